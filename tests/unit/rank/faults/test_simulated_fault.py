"""Simulated faults after a delay: the same decision on all ranks, and what happens."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults import simulated
from megatron_ft.rank.faults.plan import FAULT_TYPES, IN_LOOP_TYPES
from megatron_ft.rank.faults.simulated import SimulatedFaultParams
from tests.support.training import (
    Bench,
    bench,
    clean_environment,
    train,
)

__all__ = ["bench", "clean_environment"]  # fixtures


def fault_config(**values: Any) -> Any:
    defaults = {"simulated_fault_type": "rank_killed", "simulated_fault_rank": 0, "simulated_fault_base_delay": 10.0}
    return SimpleNamespace(**{"simulate_fault": True, **defaults, **values})


@pytest.fixture(autouse=True)
def nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_for_next_step", [])
    monkeypatch.setattr(simulated, "_slower_by_s", 0.0)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of the thread that would do it."""
    made = MagicMock()
    monkeypatch.setattr(threading, "Thread", made)
    return made


def test_simulated_fault_is_set_up_on_the_chosen_rank_only(threads: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        ft.maybe_setup_simulated_fault(fault_config(simulated_fault_rank=2))
        assert threads.call_count == int(rank >= 2)
    assert threads.return_value.daemon is True
    threads.return_value.start.assert_called_once_with()


def test_an_open_choice_is_the_same_on_all_ranks_and_differs_between_runs() -> None:
    params = SimulatedFaultParams("random", 10.0, None)
    plans = [simulated.plan(params, world_size=8, seed=lambda seed=seed: seed) for seed in range(64)]
    again = [simulated.plan(params, world_size=8, seed=lambda seed=seed: seed) for seed in range(64)]
    assert plans == again
    assert {plan.rank_to_fail for plan in plans} == set(range(8))
    assert {plan.fault_type for plan in plans} == {"rank_killed", "rank_hung"}
    assert all(10.0 <= plan.base_delay <= 12.0 for plan in plans)
    assert max(plan.base_delay for plan in plans) - min(plan.base_delay for plan in plans) > 1.0


def test_seed_without_a_process_group_depends_on_run_and_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = set()
    for run, cycle in (("a", "0"), ("a", "1"), ("b", "0")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("FT_CYCLE", cycle)
        assert simulated.common_seed() == simulated.common_seed()
        seeds.add(simulated.common_seed())
    assert len(seeds) == 3


@pytest.mark.parametrize(("kind", "number"), [("rank_killed", signal.SIGKILL), ("rank_hung", signal.SIGSTOP)])
def test_a_simulated_fault_is_logged_and_then_done(
    kind: str, number: int, bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = bench.start()
    done = threading.Event()
    kills: list[tuple[int, int]] = []

    def kill(pid: int, signum: int) -> None:
        kills.append((pid, signum))
        done.set()

    monkeypatch.setattr("os.kill", kill)
    ft.maybe_setup_simulated_fault(fault_config(simulated_fault_type=kind, simulated_fault_base_delay=0.0))
    assert done.wait(10.0)
    assert kills == [(os.getpid(), number)]
    (event,) = bench.events("fault_injected")
    assert (event["type"], event["rank"], event["cycle"]) == (kind, 0, 0)
    planned, done_now = capfd.readouterr().err.splitlines()
    what = FAULT_TYPES[kind]
    assert planned == f"FT: SIMULATED FAULT: planned: rank 0 {what} in 0.0 s ({kind})"
    assert done_now == f"FT: SIMULATED FAULT: rank 0 {what} in cycle 0"
    ft.shutdown(state)


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "ft-simulated-fault":
            thread.join(10.0)
            assert not thread.is_alive()


@pytest.mark.parametrize("kind", IN_LOOP_TYPES)
def test_fault_for_the_training_thread_is_injected_in_its_next_step(
    kind: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, threading.Thread, list[str]]] = []
    state = bench.start()

    def inject(kind: str, **more: Any) -> None:
        done.append((kind, threading.current_thread(), list(state.rank_monitor_client._recorder.open_sections)))

    monkeypatch.setattr(simulated, "inject", inject)
    train(state, 3)
    ft.maybe_setup_simulated_fault(fault_config(simulated_fault_type=kind, simulated_fault_base_delay=0.0))
    wait_for_thread()
    assert done == []
    train(state, 2)
    assert done == [(kind, threading.main_thread(), ["step"])]
    (event,) = bench.events("fault_injected")
    assert (event["type"], event["rank"], event["iteration"], event["cycle"]) == (kind, 0, 3, 0)
    ft.shutdown(state)


def test_slow_simulated_fault_slows_all_later_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    state = bench.start()
    ft.maybe_setup_simulated_fault(fault_config(simulated_fault_type="slow", simulated_fault_base_delay=0.0))
    wait_for_thread()
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    train(state, 3)
    assert slept == [1.0] * 3
    ft.shutdown(state)
