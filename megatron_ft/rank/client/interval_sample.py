"""The intervals of one section on one rank since the last calculation: the long ones, and how many there were.

A hook compares each interval with one number, and only what is longer comes here: all of them at first, then one in a
hundred or so, so that the tail is known and the hooks stay cheap.
"""

from __future__ import annotations

from megatron_ft.core.timeouts.budget_rule import FIRST_INTERVALS
from megatron_ft.core.timeouts.tail import Tail, bucket_of, length_of

_ENOUGH = 512
_KEPT_SHARE = 4
_TOO_FEW = 200
"""If fewer than one in so many was above ``above_ns``, intervals have become shorter: all are noted again."""


class IntervalSample:
    """The intervals of one section; call ``note`` for each that is longer than ``above_ns``."""

    def __init__(self) -> None:
        self.above_ns = -1
        self.longest_ns = -1
        """The longest of this cycle; -1: none yet."""
        self.first_ns = -1
        """The longest of the first intervals of this cycle; -1: none yet."""
        self._first_left = FIRST_INTERVALS
        self._counts: dict[int, float] = {}
        self._noted = 0
        self._limit = _ENOUGH
        self._settled = 0

    def note(self, took_ns: int) -> None:
        """Count an interval above ``above_ns``."""
        if took_ns > self.longest_ns:
            self.longest_ns = took_ns
        if self._first_left:
            self._first_left -= 1
            self.first_ns = max(self.first_ns, took_ns)
            return
        bucket = bucket_of(took_ns / 1e9)
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1.0
        self._noted += 1
        if self._noted >= self._limit:
            self._raise_threshold()

    def new(self, ended: int) -> tuple[Tail, int]:
        """The tail since ``settle``, and how many intervals it counts. ``ended``: intervals of this cycle in all."""
        passed = max(self._later(ended) - self._settled, self._noted)
        tail = Tail(dict(self._counts))
        if passed > self._noted:
            tail.count(0, passed - self._noted)
        return tail, passed

    def settle(self, ended: int) -> None:
        """Begin a new sample: what ``new`` returns now was used."""
        _, passed = self.new(ended)
        if passed > _TOO_FEW * max(1, self._noted):
            self.above_ns = -1
        self._counts, self._noted, self._limit, self._settled = {}, 0, _ENOUGH, self._later(ended)

    def _later(self, ended: int) -> int:
        return ended - (FIRST_INTERVALS - self._first_left)

    def _raise_threshold(self) -> None:
        above = 0.0
        for bucket in sorted(self._counts, reverse=True):
            above += self._counts[bucket]
            if above * _KEPT_SHARE >= self._noted:
                break
        # above the whole bucket if most are in it: they say nothing of the tail
        self.above_ns = round(length_of(bucket if above * 2 > self._noted else bucket - 1) * 1e9)
        self._limit = self._noted + _ENOUGH
