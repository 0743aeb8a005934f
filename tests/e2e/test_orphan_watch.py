"""A launcher is notified when the step daemon that started it dies, and when the reader of its output is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ASKS = """
import os, sys
from megatron_ft.link.reactor import Reactor
from megatron_ft.launcher.base.orphan_watch import OrphanWatch
said = []
reactor = Reactor()
watched = OrphanWatch(reactor, said.append)
with open(sys.argv[1], "w", buffering=1) as file:
    print("ready", file=file)
    while not said:
        reactor.run_once(0.05)
        watched.check()
    print(said[0], file=file)
"""
DAEMON = """
import os, subprocess, sys
open("/proc/self/comm", "w").write(sys.argv[1])
subprocess.Popen(["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, *sys.argv[2:]])
sys.stdin.read()
"""


def wait_for(file: Path, count: int) -> list[str]:
    """Lines, once there are so many."""
    for _ in range(6000):
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count:
            return lines
        signal.sigtimedwait([], 0.01)
    raise AssertionError(f"{file} has no {count} lines")


def test_a_launcher_whose_step_daemon_has_died_is_told_also_through_a_shell(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    with open(os.devnull, "w") as nothing:
        daemon = subprocess.Popen(
            [sys.executable, "-c", DAEMON, "slurmstepd", ASKS, str(heard)],
            stdin=subprocess.PIPE,
            stdout=nothing,
            stderr=nothing,
        )
    wait_for(heard, 1)
    daemon.kill()
    daemon.communicate()
    assert wait_for(heard, 2)[1] == "slurmstepd, an ancestor of this launcher, has exited"


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_launcher_whose_output_nobody_reads_is_told(tmp_path: Path, kind: str) -> None:
    heard = tmp_path / "heard"
    if kind == "pipe":
        read, write = os.pipe()
    else:
        read, write = (end.detach() for end in socket.socketpair())
    launcher = subprocess.Popen([sys.executable, "-c", ASKS, str(heard)], stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    wait_for(heard, 1)
    os.close(read)
    assert launcher.wait(60) == 0
    assert wait_for(heard, 2)[1] == "no process reads the standard output of this launcher any more"
