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


NO_MODULE = Reached(-1, -1, False, "ModuleNotFoundError: No module named 'x'")
WRONG = Reached(-1, -1, False, "exit code 2")
KILLED = Reached(-1, -1, False)
BEFORE_ANY_STEP_KNOWN = Reached(-1, -1, True)


@pytest.mark.parametrize(
    ("cycles", "count"),
    [
        ([NO_MODULE], 1),
        ([NO_MODULE, NO_MODULE], 2),
        ([NO_MODULE, WRONG], 1),
        ([WRONG, NO_MODULE, NO_MODULE, NO_MODULE], 3),
        ([NO_MODULE, KILLED, NO_MODULE], 1),
        # it has trained, or may have: another start may go well again
        ([HERE, NO_MODULE, NO_MODULE], 0),
        ([BEFORE_ANY_STEP_KNOWN, NO_MODULE, NO_MODULE], 0),
        ([None, NO_MODULE, NO_MODULE], 0),
        ([NO_MODULE, BEFORE_ANY_STEP_KNOWN, NO_MODULE, NO_MODULE], 0),
    ],
)
def test_starts_that_fail_in_the_same_way(cycles: list[Reached | None], count: int) -> None:
    advance = Advance()
    for reached in cycles:
        advance = advance.after(reached)
    assert advance.starts == count
    # in a job that has trained in an earlier life they never count
    advance = Advance(first=0, last=7)
    for reached in cycles:
        advance = advance.after(reached)
    assert advance.starts == 0


@pytest.mark.parametrize("policy", [AnyFailed, MinHealthy])
def test_a_start_that_fails_twice_in_the_same_way_is_not_tried_again(policy: type[AnyFailed | MinHealthy]) -> None:
    for count, action in ((1, Action.RESTART), (2, Action.GIVE_UP)):
        end = CycleEnd(cycle=1, outcome=Outcome.FAILED, restarts_before=1, failed_starts=count)
        decision = policy(max_restarts=9, min_nodes=1, max_failed_starts=2).decide(end)
        assert (decision.action, decision.no_progress) == (action, action is Action.GIVE_UP)
        assert policy(max_restarts=9, min_nodes=1).decide(end).action is Action.RESTART
    assert decision.reason == "2 starts in a row failed in this way before the first step, giving up"


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
