"""Simulated faults of the Lightning callbacks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from megatron_ft.integrations.lightning import FaultToleranceCallback, SimulatedFaultParams
from megatron_ft.rank.faults import simulated
from tests.support.training import clean_environment

__all__ = ["clean_environment"]  # a fixture


def never() -> int:
    raise AssertionError("nothing was left to chance")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SimulatedFaultParams("rank_kiled", 1.0), "Unknown fault type rank_kiled.*rank_killed"),
        (SimulatedFaultParams("random", "5"), "a number of seconds from 0, not '5'"),  # type: ignore[arg-type]
        (SimulatedFaultParams("random", float("nan")), "a number of seconds"),
        (SimulatedFaultParams("random", 1.0, rank_to_fail=4), "rank must be from 0 to 3, not 4"),
    ],
)
def test_mistakes_are_one_line(given: SimulatedFaultParams, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        simulated.plan(given, world_size=4, seed=never)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"fault_type": "random"}, {"fault_type": "random", "delay": 1.0}, 5.0])
def test_parameters_of_another_form_are_one_line(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^simulated_fault_params: .*$"):
        FaultToleranceCallback(True, False, simulated_fault_params=given)
