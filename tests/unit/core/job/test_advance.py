"""A job that gets on is told from one that fails at the same place for ever."""

from __future__ import annotations

import random

import pytest

from megatron_ft.core.job.progress import Advance, Reached
from megatron_ft.core.job.restart_policy import Action, AnyFailed, CycleEnd, MinHealthy, Outcome


def stalled(*cycles: Reached | None) -> int:
    """For how many cycles, after these have failed."""
    advance = Advance()
    for reached in cycles:
        advance = advance.after(reached)
    return advance.stalled


HERE = Reached(20, 25)


@pytest.mark.parametrize(
    ("cycles", "count"),
    [
        ([], 0),
        ([HERE], 0),
        ([HERE, HERE], 1),
        ([HERE, HERE, Reached(20, 24), HERE], 3),
        ([HERE, HERE, HERE, Reached(20, 26)], 0),
        # a later checkpoint is progress, though it then fails earlier
        ([HERE, HERE, Reached(22, 23)], 0),
        ([HERE, Reached(22, 23), Reached(22, 23), Reached(20, 25)], 2),
        # never an iteration: not judged
        ([Reached(-1, -1)] * 9, 0),
        # one that had some before and now fails in its start
        ([HERE, Reached(-1, -1), Reached(-1, -1)], 2),
        # nothing is known of them
        ([HERE, None, None, HERE], 1),
    ],
)
def test_cycles_that_get_no_further(cycles: list[Reached | None], count: int) -> None:
    assert stalled(*cycles) == count


def test_fifty_random_faults_with_steady_progress_never_stall() -> None:
    chance = random.Random(3)
    advance, at = Advance(), 0
    for _ in range(50):
        first = at // 10 * 10  # a checkpoint each 10 iterations
        at = max(at, first) + chance.randrange(1, 15)
        advance = advance.after(Reached(first, at))
        assert advance.stalled == 0


@pytest.mark.parametrize("policy", [AnyFailed, MinHealthy])
def test_a_job_without_progress_gives_up_though_restarts_are_left(policy: type[AnyFailed | MinHealthy]) -> None:
    for count, action in ((2, Action.RESTART), (3, Action.GIVE_UP), (4, Action.GIVE_UP)):
        end = CycleEnd(cycle=7, outcome=Outcome.FAILED, restarts_before=4, stalled=count)
        decision = policy(max_restarts=100, min_nodes=1, max_stalled=3).decide(end)
        assert (decision.action, decision.no_progress) == (action, action is Action.GIVE_UP)
        assert policy(max_restarts=100, min_nodes=1, max_stalled=0).decide(end).action is Action.RESTART
    assert decision.reason == "no progress in 4 cycles, giving up"


@pytest.mark.parametrize("outcome", [Outcome.MEMBERSHIP, Outcome.SUCCEEDED])
def test_only_failures_are_judged(outcome: Outcome) -> None:
    end = CycleEnd(cycle=7, outcome=outcome, stalled=9)
    assert not AnyFailed(max_restarts=1, max_stalled=3).decide(end).no_progress
