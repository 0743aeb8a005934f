"""The limit of open files: the launcher's own is as high as it may be, everybody else's is what it was."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.launcher.processes import worker
from megatron_ft.link.linux import process_setup
from megatron_ft.link.linux.processes import wait_gone
from megatron_ft.link.messages.fork_server_messages import Orders
from megatron_ft.run_ahead.forking_spawner import ServerProcess
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


@pytest.fixture
def lower() -> Iterator[tuple[int, int]]:
    """The limits of this process, the soft one lowered."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (min(before[0] - 1, 500), before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    yield limits
    process_setup.restore_file_limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_replaced_fork_server_and_a_rank_without_util_linux_keep_the_original_file_limit(
    lower: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process_setup.raise_file_limit()
    assert limits_of(os.getpid()) == (lower[1], lower[1])
    server = ServerProcess(Orders([sys.executable, "-u", "-m", "this"], dict(os.environ)))
    try:
        assert limits_of(server.pid) == lower
    finally:
        server.end(set)
    monkeypatch.setattr(worker, "find_setpriv", lambda _limit: [])
    started: list[worker.Worker] = []
    spec = worker.RankSpec(local_rank=0, argv=["sleep", "60"], env={"PATH": os.defpath}, stdout=None, stderr=None)
    worker.spawn([spec], started.append, print)
    assert limits_of(started[0].pid) == lower
    started[0].signal(signal.SIGKILL, whole_group=True)
    wait_gone(started[0].pidfd, 10)
    assert started[0].poll_end()
    started[0].reap()
    process_setup.restore_file_limit()
    assert limits_of(os.getpid()) == lower


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
