"""The fault injector: at its moment, once, with a record before it; and each fault really happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_plan import FAULT_TYPES, PlannedFault
from megatron_ft.rank import fault_injector
from megatron_ft.rank.fault_injector import FaultInjector, InjectedFault
from tests.support.training import Bench, bench, clean_environment

__all__ = ["bench", "clean_environment"]  # fixtures

FAULTS = (
    PlannedFault(cycle=0, rank=1, iteration=25, type="exception"),
    PlannedFault(cycle=0, rank=0, iteration=25, type="exception"),
    PlannedFault(cycle=1, rank=0, iteration=40, type="exception"),
)
BOUND_S = 30.0


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What would have been done."""
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(fault_injector, "inject", lambda kind, *, exit_code: done.append((kind, exit_code)))
    return done


def test_it_acts_at_its_moment_and_once(injected: list[tuple[str, int]]) -> None:
    injector = FaultInjector(FAULTS, rank=1, cycle=0)
    for iteration in range(25):
        injector.on_iteration(iteration)
    assert injected == []
    injector.on_iteration(25)
    assert injected == [("exception", 1)]
    injector.on_iteration(25)
    injector.on_iteration(26)
    assert len(injected) == 1


def test_other_ranks_and_cycles_arent_hit(injected: list[tuple[str, int]]) -> None:
    for rank, cycle in ((2, 0), (1, 1), (0, 2)):
        injector = FaultInjector(FAULTS, rank=rank, cycle=cycle)
        for iteration in range(100):
            injector.on_iteration(iteration)
    assert injected == []


def test_what_is_pending(injected: list[tuple[str, int]]) -> None:
    injector = FaultInjector(FAULTS, rank=1, cycle=0)
    assert injector.pending() == [FAULTS[0], FAULTS[2]]
    injector.on_iteration(25)
    assert injector.pending() == [FAULTS[2]]
    assert FaultInjector(FAULTS, rank=1, cycle=1).pending() == [FAULTS[2]] * 0
    assert FaultInjector(FAULTS, rank=0, cycle=1).pending() == [FAULTS[2]]
    assert FaultInjector(FAULTS, rank=0, cycle=2).pending() == []


def test_disabled_does_nothing() -> None:
    injector = FaultInjector.disabled()
    for iteration in range(3):
        injector.on_iteration(iteration)
    assert injector.pending() == []


def test_a_plan_file(tmp_path: Path, injected: list[tuple[str, int]], capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("faults:\n  - {rank: 1, iteration: 2, type: exit, exit_code: 7}\n")
    injector = FaultInjector.from_plan_file(file, rank=1, world_size=2, cycle=0)
    injector.on_iteration(2)
    assert injected == [("exit", 7)]
    assert capfd.readouterr().err == "FT: injected fault: rank 1 exits with code 7 at iteration 2 of cycle 0\n"
    with pytest.raises(ConfigError, match="below the number of ranks"):
        FaultInjector.from_plan_file(file, rank=0, world_size=1, cycle=0)


def test_it_is_logged_before_it_happens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    state = bench.start()
    at_the_time: list[list[dict[str, object]]] = []
    monkeypatch.setattr(
        fault_injector, "inject", lambda kind, *, exit_code: at_the_time.append(bench.events("fault_injected"))
    )
    injector = FaultInjector(FAULTS, rank=1, cycle=0, client=state.rank_monitor_client)
    injector.on_iteration(25)
    ((event,),) = at_the_time
    assert {key: event[key] for key in ("type", "rank", "iteration", "cycle")} == {
        "type": "exception",
        "rank": 1,
        "iteration": 25,
        "cycle": 0,
    }
    state.rank_monitor_client.shutdown_workload_monitoring()


# --- each fault, for real ---

VICTIM = """
import json, sys
from megatron_ft.core.fault_plan import PlannedFault
from megatron_ft.rank.fault_injector import FaultInjector
fault = PlannedFault(cycle=0, rank=0, iteration=1, type=sys.argv[1], exit_code=7)
injector = FaultInjector([fault], rank=0, cycle=0)
injector.on_iteration(0)
print("alive")
injector.on_iteration(1)
print("survived", flush=True)
"""


@contextlib.contextmanager
def victim(kind: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_for_state(process: subprocess.Popen[str], state: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while process_state(process.pid) != state:
        assert time.monotonic() < deadline, f"not in state {state} but {process_state(process.pid)}"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("rank_killed", -signal.SIGKILL),
        ("segfault", -signal.SIGSEGV),
        ("exit", 7),
        ("exception", 1),
    ],
)
def test_faults_that_end_the_process(kind: str, code: int, tmp_path: Path) -> None:
    with victim(kind, tmp_path) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == code
    assert out == "alive\n", "what was printed before must not be lost"
    assert "FT: injected fault: rank 0 " in err
    assert ("InjectedFault" in err) is (kind == "exception")
    assert list(tmp_path.iterdir()) == [], "a core dump"


def test_rank_hung_stops_the_process(tmp_path: Path) -> None:
    with victim("rank_hung", tmp_path) as process:
        wait_for_state(process, "T")
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=BOUND_S)
    assert out == "alive\nsurvived\n"


def test_sleep_sleeps_and_outlives_a_continue(tmp_path: Path) -> None:
    with victim("sleep", tmp_path) as process:
        assert process.stderr is not None
        assert "sleeps for ever" in process.stderr.readline()
        wait_for_state(process, "S")
        process.send_signal(signal.SIGCONT)
        wait_for_state(process, "S")
        assert process.poll() is None


def test_spin_spins(tmp_path: Path) -> None:
    with victim("spin", tmp_path) as process:
        assert process.stderr is not None
        assert "spins for ever" in process.stderr.readline()
        begin, deadline = cpu_ticks(process.pid), time.monotonic() + BOUND_S
        while cpu_ticks(process.pid) < begin + 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None


def test_every_type_is_tested_and_can_be_done() -> None:
    tested = {"rank_killed", "segfault", "exit", "exception", "rank_hung", "sleep", "spin"}
    assert tested == set(FAULT_TYPES)
    with pytest.raises(InjectedFault):
        fault_injector.inject("exception")
