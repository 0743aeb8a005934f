"""Children that a fork server has made and nobody has heard of."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from megatron_ft.core.preload import FORK_SERVER_NAME
from megatron_ft.launcher.descendants import end_strays
from tests.support.launching import wait_until


def test_strays_are_killed_stopped_or_not_and_nobody_else(tmp_path: Path) -> None:
    """Chaos seeds 258 and 293: a server was stopped with what it had just forked, before it could tell of it."""
    program = tmp_path / FORK_SERVER_NAME  # the kernel calls the process by the name of its script
    program.write_text("#!/bin/sh\nread forever\n")
    program.chmod(0o700)
    stopped, running, known = (subprocess.Popen([str(program)], stdin=subprocess.PIPE) for _ in range(3))
    other = subprocess.Popen(["sleep", "600"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        names = [Path(f"/proc/{each.pid}/comm") for each in (stopped, running, known)]
        wait_until(lambda: all(path.read_text().strip() == FORK_SERVER_NAME for path in names), 10)
        end_strays(FORK_SERVER_NAME, lambda: {known.pid})
        assert [stopped.wait(10), running.wait(10)] == [-signal.SIGKILL] * 2
        assert known.poll() is None
        assert other.poll() is None
    finally:
        for process in (stopped, running, known, other):
            process.kill()
            process.communicate()
