"""When a cycle is over and what follows, from counts alone; and whether a job makes progress."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.job.rules.restart_policy import (
    Action,
    JobProgress,
    NodeState,
    Outcome,
    Reached,
    Rules,
)

S, F, X, M = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED, Outcome.MEMBERSHIP


def allowing(max_restarts: int, min_nodes: int = 1, **more: Any) -> Rules:
    return Rules(min_nodes, 9, max_restarts=max_restarts, **more)


HEALTHY, DONE = NodeState.HEALTHY, NodeState.SUCCEEDED


@given(st.integers(1, 5), st.lists(st.sampled_from(NodeState), min_size=1, max_size=8))
def test_min_healthy_succeeds_only_with_enough_and_never_goes_on_with_too_few(
    min_nodes: int, nodes: list[NodeState]
) -> None:
    expected = None if HEALTHY in nodes else S
    if nodes.count(HEALTHY) + nodes.count(DONE) < min_nodes:
        expected = F
    assert allowing(3, min_nodes, min_healthy=True).judge(Counter(nodes)) is expected


@pytest.mark.parametrize("min_healthy", [False, True])
@pytest.mark.parametrize(
    ("max_restarts", "before", "outcome", "action", "left"),
    [
        # what others have used counts, also for a launcher whose first cycle this is
        (3, 2, F, Action.RESTART, 0),
        (3, 3, F, Action.GIVE_UP, 0),
        (0, 0, F, Action.GIVE_UP, 0),
        (1, 1, M, Action.RESTART, 0),
        (1, 1, S, Action.FINISH, 0),
        (1, 0, X, Action.GIVE_UP, 1),
    ],
)
def test_restarts_are_counted_for_the_job(
    min_healthy: bool,
    max_restarts: int,
    before: int,
    outcome: Outcome,
    action: Action,
    left: int,
) -> None:
    decision = allowing(max_restarts, 2, min_healthy=min_healthy).decide(
        outcome, restarts_before=before, advance=JobProgress()
    )
    assert (decision.action, decision.restarts_left) == (action, left)


def after(cycles: list[Reached | None], advance: JobProgress = JobProgress()) -> JobProgress:  # noqa: B008 - frozen
    """What is known once these have failed."""
    for reached in cycles:
        advance = advance.after(reached)
    return advance


HERE = Reached(20, 25)


@pytest.mark.parametrize(
    ("cycles", "count"),
    [
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
        # a save is progress, whatever number the iterations have
        ([HERE, HERE, HERE._replace(saved=True), HERE], 1),
        # nothing is known of them
        ([HERE, None, None, HERE], 1),
    ],
)
def test_cycles_that_get_no_further_are_counted_as_stalled(cycles: list[Reached | None], count: int) -> None:
    assert after(cycles).stalled == count


NO_MODULE = Reached(-1, -1, False, "ModuleNotFoundError: No module named 'x'")
WRONG = Reached(-1, -1, False, "exit code 2")
KILLED = Reached(-1, -1, False)
BEFORE_ANY_STEP_KNOWN = Reached(-1, -1, True)


def test_first_cycle_known_to_resume_without_memory_neither_counts_nor_forgets_what_was_counted() -> None:
    failed = Reached(first=0, last=7)
    advance = JobProgress().after(failed, restored=True).after(failed, restored=True)
    assert (advance.first, advance.last, advance.stalled) == (-1, 7, 1)
    advance = advance.after(failed)
    assert (advance.first, advance.last, advance.stalled) == (0, 7, 1)
    assert advance.after(failed).stalled == 2


@pytest.mark.parametrize(
    ("cycles", "count"),
    [
        ([NO_MODULE, NO_MODULE], 2),
        ([NO_MODULE, WRONG], 1),
        ([WRONG, NO_MODULE, NO_MODULE, NO_MODULE], 3),
        ([NO_MODULE, KILLED, NO_MODULE], 1),
        # it has trained, or may have: another start may go well again
        ([HERE, NO_MODULE, NO_MODULE], 0),
        ([BEFORE_ANY_STEP_KNOWN, NO_MODULE, NO_MODULE], 0),
        ([None, NO_MODULE, NO_MODULE], 0),
    ],
)
def test_starts_that_fail_in_the_same_way_are_counted(cycles: list[Reached | None], count: int) -> None:
    assert after(cycles).starts == count
    # in a job that has trained in an earlier life they never count
    assert after(cycles, JobProgress(first=0, last=7)).starts == 0


@pytest.mark.parametrize("known", [{"restored": True}, {"has_snapshot": True}])
def test_cycle_that_restored_or_saved_a_snapshot_is_no_failed_start(known: dict[str, bool]) -> None:
    assert after([WRONG] * 3, JobProgress().after(WRONG, **known)).starts == 0


@pytest.mark.parametrize("min_healthy", [False, True])
@pytest.mark.parametrize(
    ("counted", "bound", "reason"),
    [
        ("starts", 2, "3 starts in a row failed in this way before the first step, giving up"),
        (
            "stalled",
            3,
            "no progress in 4 cycles, giving up "
            "(none began an iteration after 25, resumed after 20 or completed a save)",
        ),
    ],
)
def test_a_job_without_progress_gives_up_though_restarts_are_left(
    min_healthy: bool, counted: str, bound: int, reason: str
) -> None:
    for count, action in ((bound - 1, Action.RESTART), (bound, Action.GIVE_UP), (bound + 1, Action.GIVE_UP)):
        advance = JobProgress(20, 25, **{counted: count})
        decision, unbounded = (
            allowing(9, 1, min_healthy=min_healthy, max_stalled=most).decide(F, advance=advance) for most in (bound, 0)
        )
        assert (decision.action, decision.no_progress) == (action, action is Action.GIVE_UP)
        assert unbounded.action is Action.RESTART
        others = [allowing(9, max_stalled=bound).decide(each, restarts_before=0, advance=advance) for each in (M, S)]
        assert not any(each.no_progress for each in others), "judged after failures only"
        restored = allowing(9, max_stalled=bound).decide(F, advance=advance, restored=True)
        assert restored.no_progress is (decision.no_progress and counted == "starts"), "the snapshot may be to blame"
    assert decision.reason == reason
