"""Maxima of several members: whom they wait for, and when they are due."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_ft.job.rules.leader_part import ToNodes
from megatron_ft.learning.gathering import BETWEEN_S, Gathering, LearningAtLeader
from megatron_ft.learning.messages import MOST_NAMES, Intervals, Killed, Observed, merge
from megatron_ft.link.wire import encode

if TYPE_CHECKING:
    from megatron_ft.job.rules.job_cycle import JobCycle
    from megatron_ft.job.rules.nodes import Node

CYCLE = 3
WAIT_S = 20.0


class Job:
    """One cycle of ``nodes`` nodes."""

    def __init__(self, nodes: int = 2) -> None:
        self.part = Gathering(CYCLE, WAIT_S)
        self.now_s = 100.0
        self.members = set(range(nodes))
        self.results: list[Intervals] = []

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        if (result := self.part.take(lambda: self.members, self.now_s)) is not None:
            self.results.append(result)

    def hear(self, member: int, length_s: float = 1.0, *, saves: int = 0, steps: int = 0, ended: bool = False) -> None:
        seen = {"step": Observed(10 + member, length_s, member)}
        self.part.hear(member, Intervals(CYCLE, (saves, steps), ended, 1 << member, seen), self.now_s)
        self.tick()


def test_maxima_are_due_when_all_members_have_reached_the_milestone() -> None:
    job = Job()
    job.hear(0, 9.0, saves=1)
    job.part.hear(1, Intervals(CYCLE + 1, (1, 0)), job.now_s)
    job.hear(1, steps=64)
    assert job.results == []
    job.hear(0, 9.0, saves=2)
    job.hear(1, 1.5, saves=1)
    assert job.results == [Intervals(CYCLE, (2, 0), False, 3, {"step": Observed(11, 9.0, 0)})]
    job.hear(1, 1.5, saves=2)
    job.tick(WAIT_S)
    assert len(job.results) == 1, "nobody has reached another one"


@pytest.mark.parametrize("end", ["silent", "lost"])
def test_member_that_does_not_get_there_is_left_out(end: str) -> None:
    job = Job()
    job.hear(0, saves=1)
    assert job.part.due_s == job.now_s + WAIT_S
    if end == "lost":
        job.members.discard(1)
        job.tick()
    else:
        job.tick(WAIT_S)
    assert len(job.results) == 1
    job.hear(1, saves=1)
    assert len(job.results) == 1


def test_results_are_a_second_apart_but_for_the_end_of_the_run() -> None:
    job = Job(1)
    for saves in (1, 2):
        job.hear(0, saves=saves)
    assert (len(job.results), job.part.due_s) == (1, job.now_s + BETWEEN_S)
    job.tick(BETWEEN_S)
    job.hear(0, saves=3)
    assert len(job.results) == 2
    job.hear(0, saves=3, ended=True)
    assert job.results[2:] == [replace(job.results[-1], reached=(3, 0), ended=True)]


def test_end_is_told_once_all_members_that_are_in_the_run_have_ended() -> None:
    job = Job(3)
    job.hear(1, 2.0, ended=True)
    job.hear(0, 8.0, ended=True)
    job.tick(1000.0)
    assert job.results == []
    job.hear(2, 3.0, ended=True)
    assert [(each.ended, each.seen["step"].longest_s) for each in job.results] == [(True, 8.0)]
    job.hear(2, 3.0, ended=True)
    assert len(job.results) == 1


def test_nothing_is_due_after_the_end_whatever_a_member_still_sends() -> None:
    job = Job()
    for member in (0, 1):
        job.hear(member, steps=10, ended=True)
    assert job.results[-1].ended
    job.hear(0, saves=1, steps=20)
    assert job.part.due_s is None, "a time in the past would be waited for without a pause"


def test_member_that_comes_back_is_in_the_run_again() -> None:
    job = Job()
    job.hear(1, ended=True)
    job.hear(1, steps=10)
    job.hear(0, ended=True)
    assert not any(each.ended for each in job.results)
    job.hear(1, ended=True)
    assert job.results[-1].ended


def test_intervals_learned_before_all_ranks_have_ended_are_no_end() -> None:
    job = Job()
    job.hear(1, ended=True)
    job.hear(0, saves=1)
    assert [(each.ended, each.reached) for each in job.results] == [(False, (1, 0))]


def test_monitor_that_replaces_another_takes_nothing_back() -> None:
    job = Job(1)
    job.hear(0, 50.0, saves=1)
    job.tick(BETWEEN_S)
    job.hear(0, 1.0, saves=2)
    assert [each.seen["step"].longest_s for each in job.results] == [50.0, 50.0]


def test_leader_tells_each_kill_once_to_all_nodes_but_that_of_the_kill() -> None:
    part, cycle = LearningAtLeader(), SimpleNamespace(decision=SimpleNamespace(cycle=CYCLE), seats=range(3))
    part.begin(cast("JobCycle", cycle))
    kill = Killed(CYCLE, "step", 60.0, moved=True)
    node = cast("Node", None)
    assert part.hear(node, 1, kill, 0.0) == [ToNodes(kill, {0, 2})]
    assert part.hear(node, 2, Killed(CYCLE, "step", 60.0), 0.0) == []
    assert part.hear(node, 1, Killed(CYCLE - 1, "setup", 60.0), 0.0) == []


observed = st.builds(Observed, st.integers(0, 99), st.floats(0, 1e6), st.integers(0, 9))
answers = st.lists(
    st.builds(
        Intervals,
        st.just(CYCLE),
        st.tuples(st.integers(0, 3), st.sampled_from([0, 10, 32])),
        st.booleans(),
        st.integers(0, 63),
        st.dictionaries(st.sampled_from(["setup", "step", "save"]), observed),
    ),
    max_size=5,
)


@given(answers, st.randoms())
def test_merge_is_the_maximum_in_whatever_order_answers_come(given: list[Intervals], chance: random.Random) -> None:
    whole = merge(CYCLE, given)
    shuffled = chance.sample(given, len(given))
    assert merge(CYCLE, [merge(CYCLE, shuffled[:2]), *shuffled, whole]) == whole
    assert whole.ended == all(each.ended for each in given)
    for name, found in whole.seen.items():
        each = [answer.seen[name] for answer in given if name in answer.seen]
        assert (found.count, found.longest_s) == (max(e.count for e in each), max(e.longest_s for e in each))
        assert found.rank == min(e.rank for e in each if e.longest_s == found.longest_s)


def test_bad_answers_do_not_make_the_result_grow() -> None:
    names = [*(f"section {number}" for number in range(500)), "x" * 5000]
    seen = Observed(2**40, 123456.789, 10**6)
    whole = merge(CYCLE, [replace(Intervals(CYCLE), seen={name: seen}) for name in reversed(names)])
    assert len(whole.seen) == MOST_NAMES
    assert len(json.dumps(sorted(whole.seen))) < 4096
    assert len(encode(whole)) < 16_384
