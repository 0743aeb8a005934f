"""Which ranks hold the others back, from how much of its time each spends in collectives: a part of the leader. Pure.

Ranks that train together take the same time for a step. What one of them needs longer for its own work, the others
spend in collectives, waiting for it. So the rank that is in collectives less than the others holds them back, by that
difference, its lag. Where all are equally slow, all wait equally little. Looks are taken at random moments, and steps
vary, so differences are also a matter of chance. A rank is named after three windows in a row or more in which it has
lagged, if it did so by `LEAST_LAG` in the mean and the others were seen to wait often enough for a lag of that size: 25
times if they wait for nothing else, 100 times if it is half of what they wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits, window_s
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.nodes import Node

LEAST_LAG = 0.1
"""Share of time. A rank whose steps take 20 % longer holds the others back by 17 %."""
_WINDOWS = 3
_CERTAIN = 25.0
"""Least product of the number of waits and the square of the lag's part in the time that the others wait."""
_LONGEST_S = 600.0
_LEAST_LOOKS = 30
_LEAST_WAITS = 6
"""Waits in a window: in a shorter one each rank may have been waited for once, or not at all, by chance."""
WORST = 8
"""Number of ranks in a result."""


class _Run(NamedTuple):
    """Windows in a row in which a rank lagged: their number, its lags, and shares and numbers of the others' waits."""

    windows: int = 0
    lag: float = 0.0
    share: float = 0.0
    waits: int = 0


class SlowRanksAtLeader(LeaderPart):
    """The launcher that prints the lines of the job is told which ranks hold the others back."""

    HEARS = Waits
    SAYS = Lags
    QUIET = (Waits,)

    def begin(self, cycle: JobCycle) -> Answers:
        self._cycle = cycle
        self._first: dict[int, RankWaits] = {}
        """Looks at each rank before this window."""
        self._last: dict[int, RankWaits] = {}
        self._nodes: dict[int, str] = {}
        self._runs: dict[int, _Run] = {}
        """Runs that lasted until the end of the last window."""
        self._slow: set[int] = set()
        self._began_s = 0.0
        self._due_s: float | None = None
        return ()

    @property
    def due_s(self) -> float | None:
        return self._due_s

    def hear(self, node: Node, place: int, message: Waits, now_s: float) -> Answers:
        if message.cycle == self._cycle.decision.cycle:
            if self._due_s is None:
                self._begin_window(now_s)
            for each in message.ranks:
                self._first.setdefault(each.rank, each)
                self._last[each.rank] = each
                self._nodes[each.rank] = node.name
        return ()

    def _begin_window(self, now_s: float) -> None:
        self._first = dict(self._last)
        self._began_s, self._due_s = now_s, now_s + window_s(self._cycle.decision.world)

    def tick(self, now_s: float) -> Answers:
        """Tell the result of a window once it is over."""
        if self._due_s is None or now_s < self._due_s or self._cycle.outcome is not None:
            return []
        over_s = now_s - self._began_s
        seen = {rank: each.since(self._first[rank]) for rank, each in self._last.items()}
        seen = {rank: each for rank, each in seen.items() if each.looks >= _LEAST_LOOKS}
        lags = lags_of(seen)
        if not lags:
            self._begin_window(now_s)
            return []
        waits = statistics.median_high(each.waits for each in seen.values())
        if over_s < _LONGEST_S and waits < _LEAST_WAITS and max(lags.values()) >= LEAST_LAG:
            self._due_s = now_s + window_s(self._cycle.decision.world)
            return []
        self._begin_window(now_s)
        self._judge(lags, statistics.median(each.share for each in seen.values()), waits)
        worst = sorted((rank for rank in lags if lags[rank] > 0), key=lambda rank: -lags[rank])
        worst.sort(key=lambda rank: rank not in self._slow)
        shown = [RankLag(rank, self._nodes[rank], lags[rank], seen[rank].share) for rank in worst[:WORST]]
        slow = tuple(each.rank for each in shown if each.rank in self._slow)
        prints = sorted(self._cycle.links())[:1]  # the launcher that prints the lines of the job
        return [ToNodes(Lags(self._cycle.decision.cycle, over_s, tuple(shown), slow), prints)]

    def _judge(self, lags: Mapping[int, float], share: float, waits: int) -> None:
        """Name ranks, and clear those that lagged neither in this window nor in the one before."""
        runs = {}
        for rank, lag in lags.items():
            if lag >= LEAST_LAG / 2:
                run = self._runs.get(rank, _Run())
                run = runs[rank] = _Run(run.windows + 1, run.lag + lag, run.share + share, run.waits + waits)
                part = run.lag / max(run.share, run.lag)
                is_certain = part * part * run.waits >= _CERTAIN
                if run.windows >= _WINDOWS and run.lag / run.windows >= LEAST_LAG and is_certain:
                    self._slow.add(rank)
            elif rank not in self._runs:
                self._slow.discard(rank)
        self._slow &= lags.keys()
        self._runs = runs


def lags_of(seen: Mapping[int, RankWaits]) -> dict[int, float]:
    """Return by how much each rank is in collectives less than the median of the others; empty for a single rank."""
    shares = sorted((each.share, rank) for rank, each in seen.items())
    low, high = (len(shares) - 2) // 2, (len(shares) - 1) // 2  # of the others' middle, without this rank
    return {
        rank: (shares[low + (low >= at)][0] + shares[high + (high >= at)][0]) / 2 - own
        for at, (own, rank) in enumerate(shares)
        if len(shares) > 1
    }
