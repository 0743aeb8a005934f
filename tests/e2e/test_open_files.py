"""The limit of open files: the launcher's own is as high as it may be, everybody else's is what it was."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.launching import Launcher

pytestmark = pytest.mark.waits

LIMIT = (600, 3000)
SCRIPT = """
import resource
say("limit", *resource.getrlimit(resource.RLIMIT_NOFILE))
forever()
"""


def limits_of(pid: int) -> tuple[int, int]:
    text = Path(f"/proc/{pid}/limits").read_text()
    soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", text)[0]
    return int(soft), int(hard)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="util-linux isn't there")
def test_file_limit_is_raised_for_the_launcher_only(fresh_launcher: Launcher) -> None:
    limit = ["prlimit", f"--nofile={LIMIT[0]}:{LIMIT[1]}"]
    launched = fresh_launcher.start(SCRIPT, prefix=limit)
    (told,) = launched.wait_for(r"^limit (\d+ \d+)$")
    assert told == "600 3000"
    assert limits_of(launched.process.pid) == (3000, 3000)
    assert [limits_of(pid) for pid in launched.monitor_pids().values()] == [LIMIT]
    launched.signal(signal.SIGTERM)
    launched.wait()
