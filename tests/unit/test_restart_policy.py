"""When a cycle is over and what follows, from counts and history alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.restart_policy import Action, AnyFailed, CycleEnd, GroupView, Outcome

S, F, X, M = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED, Outcome.MEMBERSHIP


def history(*outcomes: Outcome) -> list[CycleEnd]:
    return [CycleEnd(cycle=number, outcome=outcome) for number, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("max_restarts", "outcomes", "action", "left"),
    [
        (0, (S,), Action.FINISH, 0),
        (3, (S,), Action.FINISH, 3),
        (3, (F,), Action.RESTART, 2),
        (3, (F, F), Action.RESTART, 1),
        (3, (F, F, F), Action.RESTART, 0),
        (3, (F, F, F, F), Action.GIVE_UP, 0),
        (3, (F, S), Action.FINISH, 2),
        (0, (F,), Action.GIVE_UP, 0),
        # another node's restart, or a node that joins, costs this node nothing
        (1, (M,), Action.RESTART, 1),
        (0, (M, M, M), Action.RESTART, 0),
        (1, (F, M), Action.RESTART, 0),
        (1, (M, F, F), Action.GIVE_UP, 0),
        (3, (X,), Action.GIVE_UP, 3),
    ],
)
def test_any_failed(max_restarts: int, outcomes: tuple[Outcome, ...], action: Action, left: int) -> None:
    decision = AnyFailed(max_restarts).decide(history(*outcomes))
    assert (decision.action, decision.restarts_left) == (action, left)
    assert bool(decision.reason) == (action is Action.GIVE_UP)


@given(st.integers(0, 5), st.lists(st.sampled_from([F, M]), min_size=1, max_size=20))
def test_restarts_are_never_more_than_allowed(max_restarts: int, outcomes: list[Outcome]) -> None:
    policy, restarts, ends = AnyFailed(max_restarts), 0, history(*outcomes)
    for length in range(1, len(ends) + 1):
        decision = policy.decide(ends[:length])
        assert 0 <= decision.restarts_left <= max_restarts
        if decision.action is Action.GIVE_UP:
            assert restarts == max_restarts
            break
        restarts += ends[length - 1].outcome is F
    assert restarts <= max_restarts


@pytest.mark.parametrize(
    ("view", "outcome"),
    [
        (GroupView(running=2, succeeded=0, failed=0), None),
        (GroupView(running=1, succeeded=1, failed=0), None),
        (GroupView(running=0, succeeded=2, failed=0), S),
        (GroupView(running=1, succeeded=0, failed=1), F),
        (GroupView(running=0, succeeded=1, failed=1), F),
        (GroupView(running=2, succeeded=0, failed=0, nodes_waiting=1), M),
        # our own failure is told as such, and a finished group isn't started again for a newcomer
        (GroupView(running=1, succeeded=0, failed=1, nodes_waiting=1), F),
        (GroupView(running=0, succeeded=2, failed=0, nodes_waiting=1), S),
    ],
)
def test_any_failed_judges(view: GroupView, outcome: Outcome | None) -> None:
    assert AnyFailed(3).judge(view) is outcome
