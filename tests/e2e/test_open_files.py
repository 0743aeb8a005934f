"""The limit of open files: the launcher's own is as high as it may be, everybody else's is what it was."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.launching import Launched, Launcher

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


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="util-linux isn't there")
def test_a_launcher_that_finds_no_room_for_a_file_at_its_start_says_so(fresh_launcher: Launcher) -> None:
    launched = fresh_launcher.start(SCRIPT, prefix=["prlimit", "--nofile=13"])
    finished = launched.wait()
    assert finished.code == 1
    assert "Too many open files" in finished.lines[-1]
    assert "Traceback" not in finished.err
    _remove_what_may_be_left(launched)


def _remove_what_may_be_left(launched: Launched) -> None:
    for path in Path(launched.temp_dir).glob("megatron_ft-*"):
        shutil.rmtree(path)
