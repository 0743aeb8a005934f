"""Children that a fork server has made and nobody has heard of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_ft.link import process_tree
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.messages.fork_server_messages import FORK_SERVER_NAME
from megatron_ft.link.process_tree import end_strays, tidies_up
from tests.support.launching import wait_until


def test_strays_are_killed_stopped_or_not_and_nobody_else(tmp_path: Path) -> None:
    """Chaos seeds 258 and 293: a server was stopped with what it had just forked, before it could tell of it."""
    program = tmp_path / FORK_SERVER_NAME  # the kernel calls the process by the name of its script
    program.write_text("#!/bin/sh\nread forever\n")
    program.chmod(0o700)
    stopped, running, known = (subprocess.Popen([str(program)], stdin=subprocess.PIPE) for _ in range(3))
    other, leader = (subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp) for _ in range(2))
    started = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, leader.pid))
    try:
        stopped.send_signal(signal.SIGSTOP)
        names = [Path(f"/proc/{each.pid}/comm") for each in (stopped, running, known)]
        wait_until(lambda: all(path.read_text().strip() == FORK_SERVER_NAME for path in names), 10)
        end_strays(leader.pid, FORK_SERVER_NAME, lambda: {known.pid})
        assert [each.wait(10) for each in (stopped, running, started)] == [-signal.SIGKILL] * 3
        assert [each.poll() for each in (known, other, leader)] == [None] * 3
    finally:
        for process in (stopped, running, known, other, leader, started):
            process.kill()
            process.communicate()


def test_a_process_whose_command_line_can_t_be_read_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of one that is stuck in the kernel can't, as long as it is; it is asked for right before it is killed."""
    stuck = read_stat(os.getpid())
    words = [sys.executable, "-c", "input()", "multiprocessing.resource_tracker"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        tracker = read_stat(process.pid)
        assert stuck is not None
        assert tracker is not None
        wait_until(lambda: tidies_up(tracker), 10)
        read, never = process_tree.command_line, threading.Event()
        monkeypatch.setattr(process_tree, "reads", FileQueue())
        monkeypatch.setattr(process_tree, "READ_S", 0.05)
        monkeypatch.setattr(
            process_tree, "command_line", lambda pid: never.wait(60) and b"" if pid == stuck.pid else read(pid)
        )
        assert not tidies_up(stuck)
        assert not tidies_up(stuck)
        never.set()
        process.communicate()
