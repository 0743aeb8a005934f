"""Learned timeouts in simulated jobs: what they cost, and planted bugs that the simulation's properties find."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.coordinator.learning import CycleLearning, _OpenSurvey
from megatron_ft.core.timeouts.exchange import Intervals, Learned, Milestone, Survey
from tests.simulation.learning import Learning
from tests.simulation.plan import Fault, Plan, plain_plan_of
from tests.simulation.simulate import simulate

_SECTIONS = 4
_SAVE_EVERY_S = 300.0


def hanging(seed: int) -> Plan:
    """A job that learns, and one of whose ranks is ended by a learned timeout."""
    chance = random.Random(seed)
    plan = plain_plan_of(seed)
    rules = replace(plan.rules, max_restarts=10, min_healthy=False)
    hang = Fault(at_s=chance.uniform(1.5, 6.0), kind="rank_hangs", which=chance.randrange(1 << 20), seconds=1.0)
    faults = tuple(sorted((*plan.faults, hang), key=lambda fault: fault.at_s))
    return dataclasses.replace(plan, learns=True, rules=rules, faults=faults)


def test_properties_hold_where_learned_timeouts_end_ranks() -> None:
    runs = [simulate(hanging(seed)) for seed in range(30)]
    assert {run.plan.seed: run.broken for run in runs if run.broken} == {}
    assert sum(bool(run.job.learning.kills) for run in runs) >= 10
    assert all(any(found.timeouts for _, _, found in run.job.learning.learned) for run in runs[:3])


def _not_relayed(_self: Any, *_args: Any) -> None:
    """A kill stays where it was told."""


def _twice(old: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: CycleLearning, *args: Any) -> Any:
        survey, sends = self._survey, old(self, *args)
        if any(isinstance(each.message, Learned) for each in sends) and not hasattr(self.log, "again"):
            self.log.again = True  # type: ignore[attr-defined]
            self._survey = survey
        return sends

    return take


@pytest.mark.parametrize(
    ("owner", "name", "bug", "finds"),
    [
        (Coordinator, "_raised", _not_relayed, "has forgotten in cycle"),
        (CycleLearning, "take", _twice(CycleLearning.take), "two results of survey"),
    ],
)
def test_planted_bug_is_found(
    owner: type, name: str, bug: Callable[..., Any], finds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    broken = [line for seed in range(12) for line in simulate(hanging(seed)).broken]
    assert any(finds in line for line in broken)


def test_result_of_another_cycles_intervals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    last: dict[str, Intervals] = {}
    old = _OpenSurvey.answered

    def answered(self: _OpenSurvey, place: int, intervals: Intervals) -> None:
        kept = last.setdefault("first", intervals)
        old(self, place, replace(intervals, sketches={**intervals.sketches, **kept.sketches}))

    monkeypatch.setattr(_OpenSurvey, "answered", answered)
    broken = []
    for seed in range(12):
        last.clear()
        broken += simulate(hanging(seed)).broken
    assert any("learned {" in line for line in broken)


def test_job_without_milestones_sends_no_message_of_learning() -> None:
    runs = [simulate(dataclasses.replace(plain_plan_of(seed), learns=False)) for seed in range(5)]
    assert [run.job.learning.messages for run in runs] == [0] * 5


def test_survey_traffic_stays_within_its_bounds_for_ten_thousand_nodes() -> None:
    plan = plain_plan_of(3, nodes=500, faults=0)
    rules = replace(plan.rules, min_nodes=500, max_nodes=500)
    run = simulate(dataclasses.replace(plan, learns=True, spares=0, rules=rules, work_s=2.0))
    assert run.broken == []
    found: Learning = run.job.learning
    answers = found.bytes[Intervals] / found.counts[Intervals]
    assert found.counts[Intervals] >= 500
    assert answers / _SECTIONS <= 200.0  # one rank per node here: with 8 it is an eighth
    surveys = len({(name, each.number) for _, name, each in found.learned})
    kinds = (Milestone, Survey, Intervals, Learned)
    per_node_and_survey = sum(found.bytes[kind] for kind in kinds) / 500 / surveys
    assert 10_000 * per_node_and_survey / _SAVE_EVERY_S <= 1e6
