"""Simulated faults of the Lightning callbacks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from megatron_ft.core.facts.rank import FaultInjected
from megatron_ft.integrations import lightning_faults
from megatron_ft.integrations.lightning import (
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
    SimulatedFaultParams,
)
from megatron_ft.rank.faults import simulated
from tests.support.training import clean_environment

__all__ = ["clean_environment"]  # a fixture


def never() -> int:
    raise AssertionError("nothing was left to chance")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (SimulatedFaultParams("rank_hung", 3.5), SimulatedFaultParams("rank_hung", 3.5, 0.0, None)),
        ({"fault_type": "random", "base_delay": 12}, SimulatedFaultParams("random", 12)),
        (
            {"fault_type": "rank_killed", "base_delay": 1.0, "rand_delay": 2.0, "rank_to_fail": 3},
            SimulatedFaultParams("rank_killed", 1.0, 2.0, 3),
        ),
    ],
)
@pytest.mark.parametrize("callback", [FaultToleranceCallback, FaultToleranceSectionsCallback])
def test_simulated_fault_is_accepted_as_parameters_or_dictionary(
    callback: Any, given: Any, expected: SimulatedFaultParams | None
) -> None:
    made = callback(True, False, simulated_fault_params=given)
    assert made.simulated_fault_params == expected
    assert isinstance(made.simulated_fault_params, SimulatedFaultParams | None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fault_type": "rank_kiled", "base_delay": 1.0}, "fault_type must be one of .*rank_killed"),
        ({"fault_type": "sleep", "base_delay": 1.0}, "fault_type"),
        ({"fault_type": "random", "base_delay": -1.0}, "base_delay must be a number of seconds from 0, not -1"),
        ({"fault_type": "random", "base_delay": "5"}, "base_delay"),
        ({"fault_type": "random", "base_delay": float("nan")}, "base_delay"),
        ({"fault_type": "random", "base_delay": 1.0, "rand_delay": float("inf")}, "rand_delay"),
        ({"fault_type": "random", "base_delay": 1.0, "rank_to_fail": -1}, "rank_to_fail"),
        ({"fault_type": "random", "base_delay": 1.0, "rank_to_fail": True}, "rank_to_fail"),
        ({"fault_type": "random"}, "base_delay"),
        ({"fault_type": "random", "base_delay": 1.0, "delay": 1.0}, "delay"),
        (5.0, "simulated_fault_params must be"),
    ],
)
def test_mistakes_are_one_line(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        FaultToleranceCallback(True, False, simulated_fault_params=given)
    assert "\n" not in str(error.value)


def test_random_delay_of_a_fault_varies_within_its_bound() -> None:
    params = SimulatedFaultParams("rank_hung", 10.0, 5.0, 0)
    delays = [lightning_faults.plan(params, world_size=1, seed=never).delay_s for _ in range(100)]
    assert all(10.0 <= delay <= 15.0 for delay in delays)
    assert max(delays) - min(delays) > 1.0


def test_fault_on_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_to_fail must be a rank from 0 to 3, not 4"):
        lightning_faults.plan(SimulatedFaultParams("rank_hung", 1.0, 0.0, 4), world_size=4, seed=never)


def test_simulated_fault_is_injected_on_its_rank_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    injected: list[tuple[str, str]] = []
    client = MagicMock()
    monkeypatch.setattr(
        simulated, "inject", lambda kind, **_more: injected.append((kind, threading.current_thread().name))
    )
    logged: list[tuple[Any, ...]] = []
    monkeypatch.setattr(simulated, "log_event", lambda *args: logged.append(args))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FT_CYCLE", "3")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        lightning_faults.start(SimulatedFaultParams("rank_killed", 0.0, 0.0, 1), lambda: client)
    for thread in threading.enumerate():
        if thread.name == "ft-simulated-fault":
            assert thread.daemon
            thread.join(10)
    assert injected == [("rank_killed", "ft-simulated-fault")]
    assert logged == [(client, FaultInjected(type="rank_killed", rank=1, cycle=3))]
