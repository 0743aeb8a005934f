"""How processes are ended: a hung rank with patience for a busy machine, an orphan, strays of a fork server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.link import process_tree
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux import processes
from megatron_ft.link.linux.processes import carries, read_stat
from megatron_ft.link.messages.fork_server_messages import FORK_SERVER_NAME
from megatron_ft.link.process_tree import end_strays, tidies_up
from megatron_ft.monitor import end_of_rank
from tests.fuzz.watched import watched
from tests.support.launching import wait_until
from tests.support.monitored import expect

Starts = Callable[..., subprocess.Popen[bytes]]


def test_a_process_that_is_stuck_in_the_kernel_keeps_no_other_one_alive(
    monkeypatch: pytest.MonkeyPatch, start_process: Starts
) -> None:
    """Its environment can't be read as long as it is; here it is any job's, and listed before the others."""
    path, never = f"/nowhere/{os.urandom(8).hex()}.sock", threading.Event()
    stuck = os.getppid()

    def reads(pid: int, marker: bytes) -> bool:
        if pid == stuck:
            never.wait(60)
        return carries(pid, marker)

    monkeypatch.setattr(end_of_rank, "carries", reads)
    monkeypatch.setattr(end_of_rank, "SWEEP_S", 0.5)
    rank = start_process(start_new_session=True)
    began = time.monotonic()
    try:
        assert end_of_rank.end_orphans(path, rank.pid) == []
    finally:
        never.set()
    assert time.monotonic() - began < 30
    assert rank.wait(0) == -9


ENDS_WHEN_TOLD = """
client.init_workload_monitoring()
say('ready')
sys.stdin.readline()
client.set_iteration(7)
with client.section('step'): pass
"""


def test_a_monitor_that_is_told_to_stop_before_it_has_noticed_the_end_of_its_rank_logs_it(tmp_path: Path) -> None:
    """On a busy machine the order of a launcher that has reaped all its ranks is read first."""
    with watched(tmp_path, ENDS_WHEN_TOLD) as both:
        expect(both.rank, "ready")
        os.kill(both.monitor.pid, signal.SIGSTOP)
        both.rank.communicate("\n", 60)
        both.channel.send({"type": "stop"})
        os.kill(both.monitor.pid, signal.SIGCONT)
        assert both.monitor.wait(60) == 0
        records = [json.loads(received.message.body) for received in both.channel.receive()]
    assert [record["iteration"] for record in records if record["type"] == "rank_gone"] == [7]
    minutes = [record["ranks"] for record in records if record["type"] == "minute"]
    assert [[*row[5]] for (row,) in minutes] == [["step", "out_of_section"]]


def test_strays_are_killed_stopped_or_not_and_nobody_else(tmp_path: Path, start_process: Starts) -> None:
    """Chaos seeds 258 and 293: a server was stopped with what it had just forked, before it could tell of it."""
    program = tmp_path / FORK_SERVER_NAME  # the kernel calls the process by the name of its script
    program.write_text("#!/bin/sh\nread forever\n")
    program.chmod(0o700)
    stopped, running, known = (start_process([str(program)], stdin=subprocess.PIPE) for _ in range(3))
    other, leader = (start_process(preexec_fn=os.setpgrp) for _ in range(2))
    started = start_process(preexec_fn=lambda: os.setpgid(0, leader.pid))
    stopped.send_signal(signal.SIGSTOP)
    names = [Path(f"/proc/{each.pid}/comm") for each in (stopped, running, known)]
    wait_until(lambda: all(path.read_text().strip() == FORK_SERVER_NAME for path in names), 10)
    end_strays(leader.pid, FORK_SERVER_NAME, lambda: {known.pid})
    assert [each.wait(10) for each in (stopped, running, started)] == [-signal.SIGKILL] * 3
    assert [each.poll() for each in (known, other, leader)] == [None] * 3


def test_a_process_whose_command_line_can_t_be_read_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of one that is stuck in the kernel can't, as long as it is; it is asked for right before it is killed."""
    stuck = read_stat(os.getpid())
    words = [sys.executable, "-c", "input()", "multiprocessing.resource_tracker"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        tracker = read_stat(process.pid)
        assert stuck is not None
        assert tracker is not None
        wait_until(lambda: tidies_up(tracker), 10)
        read, never = processes.contents, threading.Event()
        monkeypatch.setattr(process_tree, "reads", FileQueue())
        monkeypatch.setattr(process_tree, "READ_S", 0.05)
        path = f"/proc/{stuck.pid}/cmdline"
        monkeypatch.setattr(
            processes, "contents", lambda place: never.wait(60) and b"" if place == path else read(place)
        )
        assert not tidies_up(stuck)
        assert not tidies_up(stuck)
        never.set()
        process.communicate()
