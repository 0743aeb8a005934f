"""Ranks that hold the others back, in simulated jobs: who is named, when, and who isn't."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.diagnosis.slow_ranks import SlowRanksAtLeader
from megatron_ft.diagnosis.waits import Lags, RankWaits, Waits
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from tests.support.job_machines import begun

LOOK_S = (0.1, 0.2)
TELL_S = 6.0


class Leader:
    """The part of a leader, for a cycle of one node."""

    def __init__(self) -> None:
        self._part = SlowRanksAtLeader()
        cycle: Any = SimpleNamespace(links=dict, decision=SimpleNamespace(cycle=0, world=1), outcome=None)
        self._part.begin(cycle)
        self._sums: dict[int, RankWaits] = {}

    def told(self, row: Sequence[RankWaits], at_s: float) -> Lags | None:
        """Return the answer to these looks, which are those since the last time."""
        for each in row:
            sums = self._sums.get(each.rank, RankWaits(each.rank, 0, 0, 0))
            counts = sums.looks + each.looks, sums.waiting + each.waiting, sums.waits + each.waits
            self._sums[each.rank] = RankWaits(each.rank, *counts)
        node: Any = SimpleNamespace(name="node")
        self._part.hear(node, 0, Waits(0, tuple(self._sums.values())), at_s)
        answers: Any = self._part.tick(at_s)
        return answers[0].message if answers else None


@dataclass
class Training:
    """Ranks that compute for ``step_s``, and then wait for the slowest.

    Args:
        factors: of the steps of slow ranks.
        jitter: standard deviation of a rank's step.
        reduce: time of a collective itself; stragglers: share of the steps in which some rank needs half a step more.
    """

    seed: int
    ranks: int
    step_s: float = 0.5
    factors: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.05
    reduce: float = 0.05
    stragglers: float = 0.0

    def waits(self, seconds: float) -> list[list[tuple[float, float]]]:
        """When each rank is in collectives."""
        chance, now_s = random.Random(self.seed), 0.0
        found: list[list[tuple[float, float]]] = [[] for _ in range(self.ranks)]
        while now_s < seconds:
            computes = [
                self.step_s * self.factors.get(rank, 1.0) * max(0.2, chance.gauss(1, self.jitter))
                for rank in range(self.ranks)
            ]
            if chance.random() < self.stragglers:
                computes[chance.randrange(self.ranks)] += self.step_s / 2
            end_s = now_s + max(computes) + self.reduce * self.step_s
            for rank, each in enumerate(computes):
                found[rank].append((now_s + each, end_s))
            now_s = end_s
        return found

    def told(self, seconds: float) -> list[tuple[float, list[RankWaits]]]:
        """What a node with all ranks tells, and when."""
        chance = random.Random(-self.seed)
        ticks = int(seconds / TELL_S)
        counts = [[[0, 0, 0] for _ in range(self.ranks)] for _ in range(ticks)]
        for rank, waits in enumerate(self.waits(seconds)):
            at, was_waiting, now_s = 0, False, chance.uniform(*LOOK_S)
            while now_s < ticks * TELL_S:
                while waits[at][1] < now_s:
                    at += 1
                is_waiting = waits[at][0] <= now_s
                count = counts[int(now_s / TELL_S)][rank]
                count[0] += 1
                count[1] += is_waiting
                count[2] += is_waiting and not was_waiting
                was_waiting, now_s = is_waiting, now_s + chance.uniform(*LOOK_S)
        rows = [[RankWaits(rank, *count) for rank, count in enumerate(each)] for each in counts]
        return [((tick + 1) * TELL_S, row) for tick, row in enumerate(rows)]

    def named(self, seconds: float) -> dict[int, float]:
        """By rank that was named, its lag then."""
        leader = Leader()
        results = [lags for at_s, row in self.told(seconds) if (lags := leader.told(row, at_s)) is not None]
        return {each.rank: each.lag for lags in results for each in lags.named}


@pytest.mark.parametrize(
    ("training", "within_s"),
    [
        *((Training(seed, ranks, factors={1: 1.2}), 240) for seed in range(5) for ranks in (2, 4, 64)),
        (Training(1, 8, factors={1: 2.0}), 48),
        (Training(1, 8, factors={1: 1.4, 6: 1.4}), 120),
        (Training(1, 64, step_s=1.0, factors={1: 1.15}), 900),
        (Training(1, 8, step_s=5.0, factors={1: 1.2}), 900),
        (Training(1, 4, step_s=40.0, factors={1: 1.5}), 3600),  # each wait takes longer than the shortest window
    ],
)
def test_slow_ranks_are_named_the_later_the_less_they_lag_and_no_others(training: Training, within_s: float) -> None:
    named = training.named(within_s)
    assert named.keys() == training.factors.keys()
    if len(named) == 1:  # the share of time that a quicker rank would save
        assert named == {1: pytest.approx(1 - 1 / training.factors[1], abs=0.08)}


@pytest.mark.parametrize(
    "training",
    [
        Training(2, 8, jitter=0.3),
        Training(3, 8, factors=dict.fromkeys(range(8), 1.5)),
        Training(4, 8, reduce=1.0),
        Training(5, 2, stragglers=0.5),
        Training(8, 2, step_s=30.0, stragglers=0.5),
        Training(9, 256, jitter=0.2),
    ],
)
def test_no_rank_is_named_where_all_are_equally_slow(training: Training) -> None:
    seconds = 600 if training.ranks > 100 else 3600
    assert training.named(seconds) == {}


@pytest.mark.parametrize(
    ("lags", "slow"),
    [
        ("x", ""),  # a single stall: rank 0 writes a checkpoint, say
        ("xx.xx", ""),
        ("xxx", "x"),
        ("xxx.", "x"),
        ("xxx..", ""),
        ("xxx.x.", "x"),
        ("y" * 40, ""),  # 8 % of the time
    ],
)
def test_rank_is_named_after_three_lags_in_a_row_and_cleared_after_two_windows_without(lags: str, slow: str) -> None:
    leader, told = Leader(), None
    for tick in range(2 * len(lags) + 1):
        waiting = {"x": 0, "y": 16, ".": 18}[lags[max(0, tick - 1) // 2]]
        told = (
            leader.told([RankWaits(rank, 50, 20 if rank else waiting, 9) for rank in range(4)], tick * TELL_S) or told
        )
    assert told is not None
    assert told.slow == ((0,) if slow else ())


def test_ranks_of_which_too_little_was_seen_are_not_compared() -> None:
    leader = Leader()
    for tick in range(40):
        assert leader.told((RankWaits(0, 3, 0, 0), RankWaits(1, 50, 25, 9)), tick * TELL_S) is None


def test_looks_are_counted_from_those_before_or_anew() -> None:
    assert RankWaits(3, 90, 40, 9).since(RankWaits(3, 50, 30, 7)) == RankWaits(3, 40, 10, 2)
    assert RankWaits(3, 20, 8, 2).since(RankWaits(3, 50, 30, 7)) == RankWaits(3, 20, 8, 2)
    assert RankWaits(3, 60, 8, 9).since(RankWaits(3, 50, 30, 7)) == RankWaits(3, 60, 8, 9)


def test_result_goes_to_the_launcher_that_speaks_for_the_job() -> None:
    machine = begun(m.Rules(min_nodes=2, max_nodes=2), "ab")
    sent: list[actions.Send] = []
    for tick in range(40):
        for link in (0, 1):
            waits = Waits(0, (RankWaits(link, 50 * tick, 30 * link * tick, 10 * link * tick),))
            machine.heard(link, m.Beat(), tick * TELL_S / 4)
            machine.heard(link, waits, tick * TELL_S / 4)
        sent += [each for each in machine.settle(tick * TELL_S / 4) if isinstance(each, actions.Send)]
    results = [(each.links, each.message) for each in sent if isinstance(each.message, Lags)]
    assert {tuple(links) for links, _ in results} == {(0,)}
    *_, (_, last) = results
    assert isinstance(last, Lags)
    assert [(each.rank, each.node) for each in last.named] == [(0, "a")]
