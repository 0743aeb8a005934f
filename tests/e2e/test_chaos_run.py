"""One run of the chaos campaign: what it leaves is found, and what its faults hit is counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from megatron_ft.link.linux.processes import carries
from tests.chaos import one
from tests.chaos.one import Run
from tests.chaos.plan import Event, Plan
from tests.support.launching import wait_until


def test_leftovers_of_a_chaos_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a process in a session of its own, a file, shared memory."""
    monkeypatch.setattr(one, "LEFT_S", 0.0)
    plan = Plan(seed=0, layout="dp", preload="none", learns=False)
    name = f"ft-chaos-{os.getpid()}"
    with Run(plan, clock_library=None) as run:
        assert run.left() == []
        key, _, value = run.mark.partition("=")
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, key: value}, start_new_session=True)
        wait_until(lambda: carries(process.pid, run.mark.encode()), 10)  # its environment is there after it is
        (run.directory / "tmp" / "megatron_ft-x").mkdir()
        memory = Path("/dev/shm", name)
        memory.touch()
        found = run.left()
        assert run.wait_gone() == found[:1]
        memory.unlink()
    run.remove()
    process.wait()
    assert found == [f"process {process.pid} sleep 60", "file megatron_ft-x", f"shared memory {name}"]


def test_processes_and_files_that_a_fault_hits_are_counted() -> None:
    def fault(name: str) -> Event:
        return Event(fault=name, phase="step", launch=0, cycle=0, rank=0, iteration=1)

    with Run(Plan(seed=0, layout="dp", preload="none", learns=False), clock_library=None) as run:
        key, _, value = run.mark.partition("=")
        process = run.process = subprocess.Popen(["sleep", "60"], env={**os.environ, key: value})
        assert run.do(fault("server_killed")) == 0
        assert run.do(fault("clock_stepped")) == 0
        assert run.do(fault("run_dir_removed")) == 0
        (run.directory / "tmp" / "megatron_ft-x").mkdir()
        assert run.do(fault("run_dir_removed")) == 1
        assert run.do(fault("launcher_killed")) == 1
        process.wait()
        assert run.do(fault("launcher_killed")) == 0
        assert run.do(fault("monitor_killed")) == 0
    run.remove()


@pytest.mark.parametrize(("launch", "hits"), [(0, 1), (1, 0)])
def test_fault_order_of_a_rank_is_carried_out_only_while_its_launcher_runs(launch: int, hits: int) -> None:
    event = Event(fault="launcher_killed", phase="step", launch=launch, cycle=0, rank=0, iteration=1)
    plan = Plan(seed=0, layout="dp", preload="none", learns=False, events=(event,))
    order = json.dumps({"number": 0, "what": "begin", "pid": os.getpid()}).encode()
    with Run(plan, clock_library=None) as run:
        process = run.process = subprocess.Popen(["sleep", "60"])
        for asks in (b"", order):  # who asks may be gone before it has said what for
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
                rank.connect(str(run.directory / "orders"))
                if asks:
                    rank.send(asks)
                else:
                    rank.shutdown(socket.SHUT_RDWR)
                run.obey()
                assert rank.recv(64) == (b"done" if asks else b"")
        assert run.hits[0] == hits
        run.note(0, event)
        assert run.seen([], "", []).missed == (set() if hits else {0})
        process.kill()
    run.remove()
