"""Maxima of several members: whom they wait for, and when they are due."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
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
    job.part.hear(1, Intervals(CYCLE + 1, (1, 0)), job.now_s)
    job.tick()
    assert job.results == []
    job.hear(0, 9.0, saves=2)
    job.hear(1, 1.5, saves=1)
    assert job.results == [Intervals(CYCLE, (2, 0), False, 3, {"step": Observed(11, 9.0, 0)})]
    job.hear(1, 1.5, saves=2)
    job.tick(WAIT_S)
    assert len(job.results) == 1, "nobody has reached another one"


@pytest.mark.parametrize("is_lost", [False, True])
def test_member_that_does_not_get_there_is_left_out(is_lost: bool) -> None:
    job = Job()
    job.hear(1)
    job.hear(0, saves=1)
    assert (job.results, job.part.due_s) == ([], job.now_s + WAIT_S)
    job.members -= {1} if is_lost else set()
    job.tick(0.0 if is_lost else WAIT_S)
    job.hear(0, saves=1, ended=True)
    assert [each.ended for each in job.results] == ([False, True] if is_lost else [False])


def test_results_are_a_second_apart_but_for_the_end_and_none_takes_anything_back() -> None:
    job = Job(1)
    job.hear(0, 50.0, saves=1)
    job.hear(0, saves=2)  # of a monitor that replaces another one
    assert (len(job.results), job.part.due_s) == (1, job.now_s + BETWEEN_S)
    job.tick(BETWEEN_S)
    job.hear(0, saves=3, ended=True)
    assert [(each.reached[0], each.ended) for each in job.results] == [(1, False), (2, False), (3, True)]
    assert [each.seen["step"].longest_s for each in job.results] == [50.0] * 3


def test_leader_tells_each_kill_once_to_all_nodes_but_that_of_the_kill() -> None:
    part, cycle = LearningAtLeader(), SimpleNamespace(decision=SimpleNamespace(cycle=CYCLE), seats=range(3))
    part.begin(cast("JobCycle", cycle))
    kill = Killed(CYCLE, "step", 60.0, moved=True)
    node = cast("Node", None)
    assert part.hear(node, 1, kill, 0.0) == [ToNodes(kill, {0, 2})]
    assert part.hear(node, 2, Killed(CYCLE, "step", 60.0), 0.0) == []
    assert part.hear(node, 1, Killed(CYCLE - 1, "setup", 60.0), 0.0) == []


def test_bad_answers_do_not_make_the_result_grow() -> None:
    names = [*(f"section {number}" for number in range(500)), "x" * 5000]
    seen = Observed(2**40, 123456.789, 10**6)
    whole = merge(CYCLE, [replace(Intervals(CYCLE), seen={name: seen}) for name in reversed(names)])
    assert len(whole.seen) == MOST_NAMES
    assert len(json.dumps(sorted(whole.seen))) < 4096
    assert len(encode(whole)) < 16_384
