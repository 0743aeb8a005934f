"""Ranks that hold the others back, in simulated jobs: who is named, when, and who isn't."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from megatron_ft.diagnosis.slow_ranks import SlowRanks, compare
from megatron_ft.diagnosis.waits import Lags, RankWaits, Waits, window_s
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from tests.support.job_machines import begun

LOOK_S = (0.1, 0.2)
TELL_S = 6.0


@dataclass
class Training:
    """Ranks that compute for ``step_s``, and then wait for the slowest.

    Args:
        factors: of the steps of slow ranks; from the second ``healed_s`` on they are as quick as the others.
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
    healed_s: float = 1e9

    def waits(self, seconds: float) -> list[list[tuple[float, float]]]:
        """When each rank is in collectives."""
        chance, now_s = random.Random(self.seed), 0.0
        found: list[list[tuple[float, float]]] = [[] for _ in range(self.ranks)]
        while now_s < seconds:
            factors = self.factors if now_s < self.healed_s else {}
            computes = [
                self.step_s * factors.get(rank, 1.0) * max(0.2, chance.gauss(1, self.jitter))
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

    def results(self, seconds: float) -> list[tuple[float, Lags]]:
        """What the machine says, and when."""
        machine, found = SlowRanks(0, 1), []
        for at_s, row in self.told(seconds):
            machine.heard("node", Waits(0, tuple(row)), at_s)
            lags = machine.take(at_s)
            found += [] if lags is None else [(at_s, lags)]
        return found

    def named(self, seconds: float) -> dict[int, float]:
        """By rank, when it was named first."""
        found: dict[int, float] = {}
        for at_s, lags in self.results(seconds):
            for rank in lags.slow:
                found.setdefault(rank, at_s)
        return found


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("seed", range(5))
def test_rank_that_is_a_fifth_slower_is_named_within_a_minute_and_no_other(seed: int, ranks: int) -> None:
    named = Training(seed, ranks, factors={1: 1.2}).named(60)
    assert list(named) == [1]


@pytest.mark.parametrize(
    "training",
    [
        Training(1, 2, jitter=0.3),
        Training(2, 8, jitter=0.3),
        Training(3, 8, factors=dict.fromkeys(range(8), 1.5)),
        Training(4, 8, reduce=1.0),
        Training(5, 2, stragglers=0.5),
        Training(6, 2, step_s=10.0, stragglers=1.0),
        Training(7, 4, step_s=20.0, jitter=0.3),
        Training(8, 2, step_s=30.0, stragglers=0.5),
        Training(9, 256, jitter=0.2),
    ],
)
def test_no_rank_is_named_where_all_are_equally_slow(training: Training) -> None:
    seconds = 600 if training.ranks > 100 else 3600
    assert training.named(seconds) == {}


def test_rank_that_is_a_little_slower_is_not_named() -> None:
    assert Training(1, 4, factors={1: 1.03}).named(1200) == {}


def test_slow_rank_of_long_steps_is_named_once_it_was_waited_for_often_enough() -> None:
    named = Training(1, 4, step_s=10.0, factors={2: 1.5}).named(600)
    assert list(named) == [2]
    assert named[2] > 60


@pytest.mark.parametrize(("ranks", "step_s", "factor"), [(64, 1.0, 1.15), (16, 5.0, 1.2)])
def test_lag_that_three_windows_do_not_tell_from_chance_is_named_by_more(
    ranks: int, step_s: float, factor: float
) -> None:
    named = Training(1, ranks, step_s=step_s, factors={1: factor}).named(400)
    assert list(named) == [1]


def test_two_slow_ranks_are_both_named() -> None:
    assert set(Training(1, 8, factors={1: 1.4, 6: 1.4}).named(120)) == {1, 6}


def test_named_rank_is_cleared_once_it_is_as_quick_as_the_others() -> None:
    results = Training(1, 4, factors={1: 1.5}, healed_s=120).results(240)
    changes = [slow for slow, _ in itertools.groupby(lags.slow for _, lags in results)]
    assert changes == [(1,), ()], "once each"


def test_lag_is_the_share_of_time_that_a_quicker_rank_would_save() -> None:
    *_, (_, lags) = Training(1, 8, factors={3: 1.25}).results(120)
    assert lags.worst[0].rank == 3
    assert lags.worst[0].lag == pytest.approx(0.2, abs=0.05)
    assert len(lags.worst) <= 8


def test_hang_names_no_rank() -> None:
    """The others are in one collective for ever, and only the rank that hangs isn't: the verdict is another's."""
    machine = SlowRanks(0, 1)
    for tick in range(200):
        looks = [RankWaits(0, 50, 0, 0), *(RankWaits(rank, 50, 50, int(tick == 0)) for rank in (1, 2, 3))]
        machine.heard("node", Waits(0, tuple(looks)), tick * TELL_S)
        lags = machine.take(tick * TELL_S)
        assert lags is None or not lags.slow


def test_ranks_of_which_too_little_was_seen_are_not_compared() -> None:
    machine = SlowRanks(0, 1)
    for tick in range(40):
        machine.heard("node", Waits(0, (RankWaits(0, 3, 0, 0), RankWaits(1, 50, 25, 9))), tick * TELL_S)
        assert machine.take(tick * TELL_S) is None


def test_each_rank_is_compared_with_the_median_of_the_others() -> None:
    waiting: Sequence[int] = (0, 40, 50, 90)
    compared = compare({rank: RankWaits(rank, 100, count, 10) for rank, count in enumerate(waiting)})
    assert [round(each.lag, 3) for each in compared.values()] == [0.5, 0.1, -0.1, -0.5]
    assert {rank: round(each.lag, 3) for rank, each in compare(two_ranks()).items()} == {0: 0.3, 7: -0.3}


def two_ranks() -> dict[int, RankWaits]:
    return {0: RankWaits(0, 100, 10, 5), 7: RankWaits(7, 100, 40, 5)}


def test_windows_of_large_jobs_are_longer() -> None:
    assert [window_s(nodes) for nodes in (1, 100, 10_000)] == [12.0, 12.0, 200.0]


def test_result_goes_to_the_launcher_that_speaks_for_the_job() -> None:
    machine = begun(m.Rules(min_nodes=2, max_nodes=2), "ab")
    sent: list[actions.Send] = []
    for tick in range(40):
        for link in (0, 1):
            waits = Waits(0, (RankWaits(link, 50, 30 * link, 10 * link),))
            machine.heard(link, m.Beat(), tick * TELL_S / 4)
            machine.heard(link, waits, tick * TELL_S / 4)
        sent += [each for each in machine.settle(tick * TELL_S / 4) if isinstance(each, actions.Send)]
    results = [(each.links, each.message) for each in sent if isinstance(each.message, Lags)]
    assert {tuple(links) for links, _ in results} == {(0,)}
    *_, (_, last) = results
    assert isinstance(last, Lags)
    assert [(each.rank, each.node) for each in last.named] == [(0, "a")]
