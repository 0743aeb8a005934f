"""Who is waited for when the nodes meet again, decided from what one node sees."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from megatron_ft.core.gathering import (
    LAST_CALL_S,
    Gathering,
    Seen,
    Verdict,
    contention_s,
    first_delay_s,
    poll_delay_s,
)

A, B, C, D = "a", "b", "c", "d"


def gathering(*nodes: str) -> Gathering:
    return Gathering(
        last_round={node: number for number, node in enumerate(nodes)}, last_number=4, min_nodes=2, max_nodes=5
    )


def seen(
    participants: str,
    *,
    waiting: str = "",
    complete: bool = False,
    number: int = 5,
    beats: dict[str, int] | None = None,
) -> Seen:
    alive = dict.fromkeys(participants + waiting, 1)
    return Seen(
        me=A,
        round=number,
        complete=complete,
        participants=frozenset(participants),
        waiting=frozenset(waiting),
        beats=alive if beats is None else beats,
    )


def ends(meeting: Gathering, state: Seen, now_s: float, absent: Collection[int] = ()) -> bool:
    return meeting.look(state, absent=absent, now_s=now_s).ends_last_call


def test_nobody_is_waited_for_when_all_of_the_last_cycle_have_come() -> None:
    meeting = gathering(A, B, C)
    assert not ends(meeting, seen("ab"), 0)
    assert not ends(meeting, seen("ab"), 1000)  # c lives, as far as is known
    assert ends(meeting, seen("abc"), 1000)


def test_only_who_takes_part_decides_and_only_when_there_are_enough() -> None:
    assert not ends(gathering(A, B), seen("b", waiting="a"), 0)
    assert not ends(gathering(B, C), seen("bc"), 0)
    assert not ends(gathering(A), seen("a"), 0)
    assert not ends(gathering(A, B), seen("ab", complete=True), 0)


def test_after_a_loss_others_may_come_for_a_moment() -> None:
    meeting = gathering(A, B, C)
    assert not ends(meeting, seen("ab"), 10, absent={2})
    assert not ends(meeting, seen("ab"), 10 + LAST_CALL_S - 0.01, absent={2})
    assert ends(meeting, seen("ab"), 10 + LAST_CALL_S, absent={2})


def test_one_who_waits_to_take_part_is_waited_for() -> None:
    meeting = gathering(A, B, C)
    assert not ends(meeting, seen("ab", waiting="d"), 10, absent={2})
    assert not ends(meeting, seen("abd"), 20, absent={2})
    assert ends(meeting, seen("abd"), 20 + LAST_CALL_S, absent={2})


def test_newcomers_come_seldom_alone() -> None:
    meeting = gathering(A, B)
    assert not ends(meeting, seen("abd"), 10)
    assert ends(meeting, seen("abd"), 10 + LAST_CALL_S)


def test_first_round_of_a_node_is_left_to_torch() -> None:
    assert gathering().look(seen("ab"), absent=(), now_s=1000) == Verdict()


def dead(meeting: Gathering, state: Seen, absent: Collection[int]) -> set[object]:
    return set(meeting.look(state, absent=absent, now_s=0).dead)


def test_lost_node_is_taken_out_of_the_last_round_and_of_the_next() -> None:
    last = seen("abc", complete=True, number=4)
    assert dead(gathering(A, B, C), last, {2}) == {C}
    assert dead(gathering(A, B, C), last, ()) == set()
    assert dead(gathering(A, B, C), seen("abc"), {2}) == {C}
    assert dead(gathering(A, B, C), seen("ab", waiting="c"), {2}) == {C}
    assert dead(gathering(A, B, C), seen("ab"), {2}) == set()  # it isn't there any more


def test_nobody_takes_itself_out() -> None:
    assert dead(gathering(A, B), seen("ab"), {0}) == set()


def test_one_who_comes_back_stays() -> None:
    meeting = gathering(A, B, C)
    assert dead(meeting, seen("ab", waiting="c", beats={A: 1, B: 1, C: 7}), {2}) == {C}
    assert dead(meeting, seen("ab", waiting="c", beats={A: 2, B: 2, C: 7}), {2}) == {C}
    assert dead(meeting, seen("ab", waiting="c", beats={A: 2, B: 2, C: 9}), {2}) == set()


def test_what_was_known_of_the_last_cycle_says_nothing_of_the_next() -> None:
    # those who know already that the round is complete aren't heard of in the last cycle any more
    assert dead(gathering(A, B, C), seen("abc", complete=True, number=5), {2}) == set()


def test_who_stands_by() -> None:
    """What a node has left, as the first one to do so, still looks complete; it is no cycle that runs without it."""
    assert seen("bc", complete=True, number=5).stands_by(4)
    assert seen("bc", complete=True, number=0).stands_by(None), "its first round, and the job's"
    assert not seen("bc", complete=True, number=4).stands_by(4)
    assert not seen("bc", number=5).stands_by(4)
    assert not seen("abc", complete=True, number=5).stands_by(4)


def test_who_is_missing() -> None:
    meeting = gathering(A, B, C, D)
    assert meeting.missing(seen("abcd", waiting="", complete=True, number=4)) == [A, B, C, D]
    assert meeting.missing(seen("cd", waiting="a", complete=True, number=4)) == [B, C, D]
    assert meeting.missing(seen("bd")) == [A, C]
    assert meeting.missing(seen("bd"), absent={2}) == [A]


@pytest.mark.parametrize("nodes", [1, 3, 30, 1000, 10_000])
def test_all_nodes_together_ask_about_as_often(nodes: int) -> None:
    assert nodes / poll_delay_s(nodes, 0) <= max(500, nodes / 2)
    assert poll_delay_s(nodes, 0) <= 2
    assert first_delay_s(nodes) <= 2
    assert contention_s(nodes, 1) <= contention_s(nodes, 2) <= contention_s(nodes, 1000) <= 2


def test_few_nodes_meet_at_once_and_wait_patiently() -> None:
    assert poll_delay_s(3, 0) < 0.02
    assert first_delay_s(1) == contention_s(1, 3) == 0
    assert 0.1 < poll_delay_s(3, 600) <= 0.5
