"""How a monitor ends its rank: a hung one with patience for a busy machine, an orphan with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_ft.core import escalation
from megatron_ft.ipc.linux.proc import run_delays_ns
from megatron_ft.ipc.linux.processes import carries
from megatron_ft.monitor import end_of_rank
from megatron_ft.monitor.end_of_rank import RankTermination

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_a_process_that_is_stuck_in_the_kernel_keeps_no_other_one_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment can't be read as long as it is; here it is any job's, and listed before the others."""
    path, never = f"/nowhere/{os.urandom(8).hex()}.sock", threading.Event()
    stuck = os.getppid()

    def reads(pid: int, marker: bytes) -> bool:
        if pid == stuck:
            never.wait(60)
        return carries(pid, marker)

    monkeypatch.setattr(end_of_rank, "carries", reads)
    monkeypatch.setattr(end_of_rank, "_SWEEP_S", 0.5)
    rank = subprocess.Popen(SLEEPS, start_new_session=True)
    began = time.monotonic()
    try:
        assert end_of_rank.end_orphans(path, rank.pid) == []
        assert time.monotonic() - began < 30
        assert rank.wait(0) == -9
    finally:
        never.set()
        rank.kill()
        rank.wait()


def test_what_has_left_the_group_is_known_by_its_environment() -> None:
    path = f"/nowhere/{os.urandom(8).hex()}.sock"
    environment = {**os.environ, "FT_RANK_MONITOR_IPC_SOCKET": path}
    rank = subprocess.Popen(SLEEPS, start_new_session=True)
    left_it = subprocess.Popen(SLEEPS, start_new_session=True, env=environment)
    other = subprocess.Popen(SLEEPS, start_new_session=True)
    try:
        assert end_of_rank.end_orphans(path, rank.pid) == []
        assert (rank.wait(0), left_it.wait(0), other.poll()) == (-9, -9, None)
    finally:
        for process in (rank, left_it, other):
            process.kill()
            process.wait()


def test_a_rank_that_gets_no_cpu_has_more_time_before_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_ns = 0
    monkeypatch.setattr(escalation, "GRACE_S", 0.05)
    monkeypatch.setattr(end_of_rank, "run_delays_ns", lambda pid: {pid: waited_ns})
    rank = subprocess.Popen(SLEEPS)
    pidfd = os.pidfd_open(rank.pid)
    try:
        termination = RankTermination(rank.pid, pidfd, signal.SIGURG, due_at=0.0)  # which it ignores
        signalled = time.monotonic()
        assert termination.advance() == [signal.SIGURG, signal.SIGCONT]
        waited_ns = 400_000_000
        while not (sent := termination.advance()):
            time.sleep(0.01)
        assert time.monotonic() - signalled >= 0.45
        assert sent == [signal.SIGKILL, signal.SIGCONT]
        assert rank.wait(20) == -signal.SIGKILL
    finally:
        os.close(pidfd)
        rank.kill()
        rank.wait()


def test_how_long_a_process_waits_for_a_cpu_is_known() -> None:
    """Two that never pause share one CPU."""
    if not any(run_delays_ns(os.getpid()).values()):
        pytest.skip("this kernel doesn't count it")
    cpu = min(os.sched_getaffinity(0))
    spin = [sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while any(run_delays_ns(process.pid)[process.pid] < 200_000_000 for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert run_delays_ns(processes[0].pid) == {}
