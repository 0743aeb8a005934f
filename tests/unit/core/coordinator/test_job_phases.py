"""The phase of a job follows its cycle: outcome, verdict, and requests for its end, in any order."""

from __future__ import annotations

import pytest

from megatron_ft.core.coordinator.job_cycle import JobCycle
from megatron_ft.core.coordinator.job_phases import CoordinatorPhase
from megatron_ft.core.facts.launcher import Cause
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.restart_policy import Action, NodeState, Outcome
from tests.support.job_machines import RULES, decision


def failed() -> JobCycle:
    cycle = JobCycle(RULES, decision(size=2))
    cycle.changed(0, m.Report(0, NodeState.UNHEALTHY, Cause(text="rank 0 exited with code 7")))
    assert cycle.conclude(1.0, joining=0)
    return cycle


def verdict_on(cycle: JobCycle) -> m.Verdict:
    verdict = cycle.judge(1.0, nodes_left=2)
    assert verdict is not None
    assert verdict.decision.action is Action.RESTART
    return verdict


def test_failed_cycle_is_judged_before_another_one_follows() -> None:
    cycle = failed()
    before = cycle.state.phase
    verdict_on(cycle)
    assert (before, cycle.state.phase) == (CoordinatorPhase.JUDGING, CoordinatorPhase.RESTARTING)


@pytest.mark.parametrize("is_judged", [False, True])
def test_request_for_the_end_of_the_job_ends_it_after_the_cycle(is_judged: bool) -> None:
    cycle = failed()
    if is_judged:
        verdict_on(cycle)
    cycle.asked_to_end(1, "diverged")
    if not is_judged:
        verdict_on(cycle)
    assert cycle.state.phase is CoordinatorPhase.ENDING


def test_verdict_that_is_told_before_the_outcome_counts_once_the_cycle_is_over() -> None:
    verdict = verdict_on(failed())
    cycle = JobCycle(RULES, decision(size=2))
    cycle.restored(0, m.NodeStatus(cycle=0, verdict=verdict), 1.0)
    before = cycle.state.phase
    cycle.restored(1, m.NodeStatus(cycle=0, ended=Outcome.FAILED, verdict=verdict), 2.0)
    assert (before, cycle.state.phase) == (CoordinatorPhase.RUNNING, CoordinatorPhase.RESTARTING)
