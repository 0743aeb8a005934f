"""Which ranks hold the others back, from how much of its time each spends in collectives. Pure.

Ranks that train together take the same time for a step. What one of them needs longer for its own work, the others
spend in collectives, waiting for it. So the rank that is in collectives less than the others holds them back, by that
difference. Where all are equally slow, all wait equally little. What is measured are looks at random moments, so
differences are also a matter of chance: a rank is named once it lagged in `_WINDOWS` windows one after another, by
`LEAST_LAG` in all of them together, and by more than chance gives in a job of that size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits, window_s

LEAST_LAG = 0.1
"""Share of time. A rank whose steps take 20 % longer holds the others back by 17 %."""
_WINDOWS = 3
_LONGEST_S = 600.0
_LEAST_LOOKS = 30
_LEAST_WAITS = 3
"""Waits in a window: in a shorter one each rank may have been waited for once, or not at all, by chance."""
_ONE_IN = 1e5
"""A rank that doesn't lag seems to in about one of so many times."""
WORST = 8
"""Ranks that are told of."""


@dataclass(frozen=True, slots=True)
class _Streak:
    """A rank's windows one after another in which it lagged, weighted by looks."""

    windows: int = 0
    looks: int = 0
    lag: float = 0.0
    """Sum of lag x looks."""
    variance: float = 0.0
    """Sum of variance x looks^2."""

    def plus(self, looks: int, lag: float, variance: float) -> _Streak:
        return _Streak(
            self.windows + 1, self.looks + looks, self.lag + lag * looks, self.variance + variance * looks * looks
        )

    def is_slow(self, ranks: int) -> bool:
        """Return True if this isn't chance, in a job of so many ranks."""
        needed = math.sqrt(2 * math.log(_ONE_IN * ranks))
        return (
            self.windows >= _WINDOWS
            and self.lag >= LEAST_LAG * self.looks
            and self.lag >= needed * math.sqrt(self.variance)
        )


class SlowRanks:
    """The slow ranks of one cycle with so many ``nodes``. Times are seconds of the coordinator's own clock."""

    def __init__(self, cycle: int, nodes: int) -> None:
        self._cycle = cycle
        self._window_s = window_s(nodes)
        self._seen: dict[int, RankWaits] = {}
        self._nodes: dict[int, str] = {}
        self._streaks: dict[int, _Streak] = {}
        self._slow: set[int] = set()
        self._doubted: set[int] = set()
        """Ranks that didn't lag in the last window: a named one is cleared after two."""
        self._windows = 0
        self._began_s: float | None = None
        self.alarm_s: float | None = None
        """When to call ``take``, at the latest."""

    def heard(self, node: str, waits: Waits, now_s: float) -> None:
        """Take what a node has seen of its ranks."""
        if waits.cycle != self._cycle:
            return
        if self._began_s is None:
            self._begin(now_s)
        for each in waits.ranks:
            known = self._seen.get(each.rank)
            self._seen[each.rank] = each if known is None else known.plus(each)
            self._nodes[each.rank] = node

    def _begin(self, now_s: float) -> None:
        self._seen.clear()
        self._began_s, self.alarm_s = now_s, now_s + self._window_s

    def take(self, now_s: float) -> Lags | None:
        """Return what a window has shown, once it is over."""
        if self._began_s is None or self.alarm_s is None or now_s < self.alarm_s:
            return None
        over_s = now_s - self._began_s
        seen = {rank: each for rank, each in self._seen.items() if each.looks >= _LEAST_LOOKS}
        if len(seen) < 2:
            self._begin(now_s)
            return None
        compared = compare(seen)
        if any(each.lag >= LEAST_LAG and each.waits < _LEAST_WAITS for each in compared.values()):
            if over_s < _LONGEST_S:
                self.alarm_s = now_s + self._window_s
                return None
        self._judge(seen, compared)
        self._windows += 1
        self._begin(now_s)
        worst = sorted((rank for rank in compared if compared[rank].lag > 0), key=lambda rank: -compared[rank].lag)
        shown = [rank for rank in worst if rank in self._slow][:WORST]
        shown = [*shown, *(rank for rank in worst if rank not in self._slow)][:WORST]
        lags = [RankLag(rank, self._nodes[rank], compared[rank].lag, seen[rank].share) for rank in shown]
        lags.sort(key=lambda each: -each.lag)
        slow = tuple(each.rank for each in lags if each.rank in self._slow)
        return Lags(self._cycle, over_s, tuple(lags), slow if self._windows >= _WINDOWS else None)

    def _judge(self, seen: Mapping[int, RankWaits], compared: Mapping[int, Comparison]) -> None:
        for rank, each in compared.items():
            if each.lag < LEAST_LAG / 2:
                self._streaks.pop(rank, None)
                if rank in self._doubted:
                    self._slow.discard(rank)
                self._doubted.add(rank)
                continue
            self._doubted.discard(rank)
            streak = self._streaks.get(rank, _Streak()).plus(seen[rank].looks, each.lag, each.variance)
            self._streaks[rank] = streak
            if streak.is_slow(len(seen)):
                self._slow.add(rank)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A rank beside the others. ``variance``: of ``lag``, by chance; ``waits``: of the others, by their median."""

    lag: float
    variance: float
    waits: float


def compare(seen: Mapping[int, RankWaits]) -> dict[int, Comparison]:
    """Compare each rank with the median of the others. There are two ranks at least."""
    shares = sorted((each.share, rank) for rank, each in seen.items())
    waits = sorted((each.waits, rank) for rank, each in seen.items())
    at_share = {rank: at for at, (_, rank) in enumerate(shares)}
    at_waits = {rank: at for at, (_, rank) in enumerate(waits)}
    sorted_shares, sorted_waits = [share for share, _ in shares], [count for count, _ in waits]
    found = {}
    for rank, each in seen.items():
        typical = _median_without(sorted_shares, at_share[rank])
        seen_waits = _median_without(sorted_waits, at_waits[rank])
        found[rank] = Comparison(typical - each.share, _variance(typical, seen_waits, each), seen_waits)
    return found


def _variance(typical: float, waits: float, own: RankWaits) -> float:
    """Return the variance of the difference between a typical rank's share and that of ``own``.

    Looks that meet the same wait count once: there are no more independent ones than waits.
    """
    of_others, of_own = typical * (1 - typical), own.share * (1 - own.share)
    independent = min(own.looks, waits / of_others) if of_others else own.looks
    return (of_others + of_own + 1 / own.looks) / max(independent, 1e-9)


def _median_without(values: Sequence[float], at: int) -> float:
    """Return the median of sorted values without one of them."""
    left = len(values) - 1
    low, high = (left - 1) // 2, left // 2
    return (values[low + (low >= at)] + values[high + (high >= at)]) / 2
