"""What all nodes know of a cycle: the same after the same entries, whoever reads them and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.job_view import Entry, JobView, NodeReport, gone, newcomers, node_changed, shutdown_requested
from megatron_ft.core.restart_policy import AnyFailed, MinHealthy, NodeState, Outcome

NODES = 3
JUDGE = MinHealthy(3, 2).judge_nodes


def changed(node: int, state: NodeState) -> Entry:
    return node_changed(node, state, name=f"host{node}", text="because")


def fold(entries: Sequence[Entry], judge: object = JUDGE) -> JobView:
    view = JobView((NodeReport(),) * NODES)
    for entry in entries:
        view = view.after(entry, judge)  # type: ignore[arg-type]
    return view


states = st.builds(changed, st.integers(0, NODES - 1), st.sampled_from(NodeState))
entries = st.one_of(
    states,
    st.builds(gone, st.integers(0, NODES - 1)),
    st.builds(lambda node: newcomers(node, count=1), st.integers(0, NODES - 1)),
    st.builds(lambda node: shutdown_requested(node, name="", text="enough"), st.integers(0, NODES - 1)),
)


@given(st.lists(entries, max_size=15))
def test_what_is_decided_stays(log: list[Entry]) -> None:
    decided = [fold(log[:length]).outcome for length in range(len(log) + 1)]
    first = next((outcome for outcome in decided if outcome is not None), None)
    assert set(decided) <= {None, first}


@given(st.lists(states, max_size=15))
def test_a_node_that_has_succeeded_stays_so(log: list[Entry]) -> None:
    done = {node for node in range(NODES) if fold(log).nodes[node].state is NodeState.SUCCEEDED}
    after = fold([*log, *(changed(node, NodeState.LOST) for node in range(NODES))])
    assert {node for node in range(NODES) if after.nodes[node].state is NodeState.SUCCEEDED} == done
    assert after.all_gone()  # nobody waits for a launcher that is lost


def test_second_bad_node_ends_the_cycle() -> None:
    assert fold([changed(0, NodeState.UNHEALTHY)]).outcome is None
    view = fold([changed(0, NodeState.UNHEALTHY), changed(2, NodeState.LOST)])
    assert view.outcome is Outcome.FAILED
    assert view.nodes[2] == NodeReport(NodeState.LOST, "host2", "because")


def test_request_to_shut_down_is_known_whatever_was_decided_before() -> None:
    request = shutdown_requested(1, name="host1", text="rank 4 asked")
    assert fold([request]).outcome is Outcome.STOPPED
    late = fold([changed(0, NodeState.LOST), changed(2, NodeState.LOST), request])
    assert late.outcome is Outcome.FAILED
    assert late.shutdown is not None
    assert late.shutdown.text == "rank 4 asked"


@pytest.mark.parametrize("state", [NodeState.UNHEALTHY, NodeState.LOST])
def test_first_one_told_ends_the_cycle_of_any_failed_for_all(state: NodeState) -> None:
    judge = AnyFailed(3).judge_nodes
    first = {**node_changed(1, state, name="b", text="rank 3 died", kind="signal", rank=3)}
    view = fold([first, changed(0, NodeState.UNHEALTHY), newcomers(2, count=1)], judge)
    assert (view.outcome, view.decided_by, view.newcomers) == (Outcome.FAILED, 1, 0)
    assert view.nodes[1] == NodeReport(state, "b", "rank 3 died", "signal", 3)


def test_newcomers_end_the_cycle_for_all() -> None:
    view = fold([newcomers(2, count=2), changed(0, NodeState.UNHEALTHY)], AnyFailed(3).judge_nodes)
    assert (view.outcome, view.decided_by, view.newcomers) == (Outcome.MEMBERSHIP, 2, 2)


def test_only_what_nobody_needs_any_more_is_left_unsaid() -> None:
    decided = fold([changed(1, NodeState.UNHEALTHY)], AnyFailed(3).judge_nodes)
    for entry in (changed(0, NodeState.UNHEALTHY), newcomers(0, count=1)):
        assert decided.makes_needless(entry)
        assert not fold([]).makes_needless(entry)
    for entry in (
        changed(0, NodeState.LOST),
        changed(0, NodeState.EXCLUDED),
        gone(0),
        shutdown_requested(0, name="", text=""),
    ):
        assert not decided.makes_needless(entry)


def test_excluded_node_restarts_the_others_of_any_failed() -> None:
    assert fold([changed(1, NodeState.EXCLUDED)], AnyFailed(3).judge_nodes).outcome is Outcome.MEMBERSHIP


@pytest.mark.parametrize(
    ("log", "node", "watched"),
    [
        ([], 0, 1),
        ([], 2, 0),
        ([changed(1, NodeState.LOST)], 0, 2),
        ([changed(1, NodeState.UNHEALTHY)], 0, 1),  # its launcher lives
        ([changed(1, NodeState.SUCCEEDED)], 0, 1),
        ([gone(1), changed(2, NodeState.EXCLUDED)], 0, None),
    ],
)
def test_who_is_watched_by_whom(log: list[Entry], node: int, watched: int | None) -> None:
    assert fold(log).next_alive(node) == ([] if watched is None else [watched])


def test_several_are_watched_by_each_but_nobody_twice_or_by_itself() -> None:
    assert fold([]).next_alive(1, 2) == [2, 0]
    assert fold([]).next_alive(1, 5) == [2, 0]
    assert fold([gone(2)]).next_alive(1, 2) == [0]


@pytest.mark.parametrize("entry", [{}, {"ev": "state", "node": 7, "state": "lost"}, {"ev": "news", "node": 1}])
def test_unknown_entries_say_nothing(entry: Entry) -> None:
    assert fold([entry]) == fold([])
