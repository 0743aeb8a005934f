"""Which ranks hold the others back, from how much of its time each spends in collectives. Pure.

Ranks that train together take the same time for a step. What one of them needs longer for its own work, the others
spend in collectives, waiting for it. So the rank that is in collectives less than the others holds them back, by that
difference. Where all are equally slow, all wait equally little. What is measured are looks at random moments, so
differences are also a matter of chance: a rank is named once it has lagged in three windows or more one after another,
and in all of them together by `LEAST_LAG` and by more than chance gives in a job of that size.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits, window_s

LEAST_LAG = 0.1
"""Share of time. A rank whose steps take 20 % longer holds the others back by 17 %."""
_WINDOWS, _MOST_WINDOWS = 3, 16
_LONGEST_S = 600.0
_LEAST_LOOKS = 30
_LEAST_WAITS = 6
"""Waits in a window: in a shorter one each rank may have been waited for once, or not at all, by chance."""
_ONE_IN = 1e5
"""Inverse of the probability of naming a rank that does not lag."""
WORST = 8
"""Number of ranks in a result."""


class Comparison(NamedTuple):
    """A rank beside the median of the others. ``chance``: standard deviation of ``lag``; ``waits``: of the others."""

    lag: float
    chance: float
    waits: float


class SlowRanks:
    """The slow ranks of one cycle of ``nodes`` nodes. Times are seconds of the coordinator's own clock."""

    def __init__(self, cycle: int, nodes: int) -> None:
        self._cycle = cycle
        self._window_s = window_s(nodes)
        self._seen: dict[int, RankWaits] = {}
        self._nodes: dict[int, str] = {}
        self._windows: deque[tuple[dict[int, RankWaits], dict[int, Comparison]]] = deque(maxlen=_MOST_WINDOWS)
        self._slow: set[int] = set()
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
            self._seen[each.rank] = each.plus(self._seen.get(each.rank))
            self._nodes[each.rank] = node

    def _begin(self, now_s: float) -> None:
        self._seen = {}
        self._began_s, self.alarm_s = now_s, now_s + self._window_s

    def take(self, now_s: float) -> Lags | None:
        """Return what a window has shown, once it is over; None until three are."""
        if self._began_s is None or self.alarm_s is None or now_s < self.alarm_s:
            return None
        over_s = now_s - self._began_s
        seen = {rank: each for rank, each in self._seen.items() if each.looks >= _LEAST_LOOKS}
        found = compare(seen)
        if over_s < _LONGEST_S and any(each.lag >= LEAST_LAG and each.waits < _LEAST_WAITS for each in found.values()):
            self.alarm_s = now_s + self._window_s
            return None
        self._begin(now_s)
        if not found:
            return None
        self._windows.append((seen, found))
        if len(self._windows) < _WINDOWS:
            return None
        self._judge()
        worst = sorted((rank for rank in found if found[rank].lag > 0), key=lambda rank: -found[rank].lag)
        shown = sorted(worst, key=lambda rank: rank not in self._slow)[:WORST]
        lags = [RankLag(rank, self._nodes[rank], found[rank].lag, seen[rank].share) for rank in worst if rank in shown]
        return Lags(self._cycle, over_s, tuple(lags), tuple(each.rank for each in lags if each.rank in self._slow))

    def _judge(self) -> None:
        """Name ranks that lagged in all their last windows, and clear those that lagged in neither of the last two."""
        newest = [*reversed(self._windows)]
        lagging = [{rank for rank, each in found.items() if each.lag >= LEAST_LAG / 2} for _, found in newest]
        runs = {rank: sum(itertools.accumulate((rank in each for each in lagging), min)) for rank in lagging[0]}
        named, total = set[int](), dict[int, RankWaits]()
        for length, (seen, _) in enumerate(newest[: max(runs.values(), default=0)], 1):
            total |= {rank: each.plus(total.get(rank)) for rank, each in seen.items()}
            if length < _WINDOWS or length not in runs.values():
                continue
            needed = math.sqrt(2 * math.log(_ONE_IN * len(total)))
            for rank, each in compare(total).items():
                if runs.get(rank) == length and each.lag >= max(LEAST_LAG, needed * each.chance):
                    named.add(rank)
        self._slow = self._slow & (lagging[0] | lagging[1]) | named


def compare(seen: Mapping[int, RankWaits]) -> dict[int, Comparison]:
    """Compare each rank with the median of the others; empty if there are none.

    Looks that meet the same wait count once for chance: there are no more independent ones than waits.
    """
    if len(seen) < 2:
        return {}
    shares = sorted((each.share, rank) for rank, each in seen.items())
    waits = sorted((each.waits, rank) for rank, each in seen.items())
    at_share = {rank: at for at, (_, rank) in enumerate(shares)}
    at_waits = {rank: at for at, (_, rank) in enumerate(waits)}
    found = {}
    for rank, own in seen.items():
        typical = _median_without(shares, at_share[rank])
        waited = _median_without(waits, at_waits[rank])
        of_others, of_own = typical * (1 - typical), own.share * (1 - own.share)
        independent = min(own.looks, waited / of_others) if of_others else own.looks
        chance = math.sqrt((of_others + of_own + 1 / own.looks) / max(independent, 1e-9))
        found[rank] = Comparison(typical - own.share, chance, waited)
    return found


def _median_without(values: Sequence[tuple[float, int]], at: int) -> float:
    """Return the median of sorted values without one of them."""
    left = len(values) - 1
    low, high = (left - 1) // 2, left // 2
    return (values[low + (low >= at)][0] + values[high + (high >= at)][0]) / 2
