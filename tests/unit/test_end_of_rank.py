"""What a monitor does when its launcher has died: everything that its rank started is ended, and nobody waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from megatron_ft.ipc.processes import carries
from megatron_ft.monitor import end_of_rank

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
