"""A rank's intervals of a minute, as its monitor sums them up for the event log. Pure; lengths are seconds."""

from __future__ import annotations

import bisect
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from megatron_ft.link.base.codec import Count, Finite, Int, Rank, Seconds
from megatron_ft.link.base.intervals import HangKind

MINUTE_NS = 60_000_000_000
MOST_SPANS = 6
"""Intervals of a section in a minute up to which each is logged with its beginning: a checkpoint, a setup."""
NONE_S = -1.0
OUT_OF_SECTION = HangKind.OUT_OF_SECTION.value
HEARTBEAT = HangKind.HEARTBEAT.value
"""Name of the intervals between heartbeats."""
_DIGITS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
BOUNDS_S = tuple(float(f"{digit}e{power}") for power in range(-3, 6) for digit in _DIGITS)
"""Upper ends of the buckets: ten per decade, from a millisecond to days. The last bucket has none."""
_Bucket = Annotated[int, Meta(ge=0, le=len(BOUNDS_S))]
_SecondsOrNone = Annotated[float, Meta(ge=NONE_S, le=2.0**53)]


def bucket_of(length_s: float) -> int:
    """Return the bucket of an interval; a length at the end of two is in the lower one."""
    return bisect.bisect_left(BOUNDS_S, length_s)


def middle_of(bucket: int) -> float:
    """Return the length that stands for all in a bucket, to 12 %."""
    return math.sqrt(BOUNDS_S[max(bucket - 1, 0)] * BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)])


class SectionMinute(msgspec.Struct, array_like=True):
    """Intervals of one section that ended in the minute.

    Args:
        count: number of intervals. total_s: sum of their lengths.
        first_s: longest of the first times out of section in a cycle; NONE_S if there was none.
        longest_s: longest of the others; NONE_S if there was none.
        open_s: age of the interval that is open at the minute's end; NONE_S if none is.
        depth: other sections open around them.
        spans: beginning, seconds after the record's ``at_ns`` (negative: before), and length of each; empty for more
            than MOST_SPANS.
        counts: number of the others by bucket.
    """

    count: Count = 0
    total_s: Seconds = 0.0
    longest_s: _SecondsOrNone = NONE_S
    first_s: _SecondsOrNone = NONE_S
    open_s: _SecondsOrNone = NONE_S
    depth: Count = 0
    spans: list[tuple[Finite, Finite]] = []
    counts: dict[_Bucket, Count] = {}

    def add(self, begin_s: float, length_s: float, *, depth: int, is_first: bool) -> None:
        """Count an interval."""
        self.count += 1
        self.total_s = round(self.total_s + length_s, 4)
        self.depth = depth
        self.spans = [*self.spans, (round(begin_s, 4), round(length_s, 4))] if self.count <= MOST_SPANS else []
        if is_first:
            self.first_s = max(self.first_s, round(length_s, 4))
            return
        self.longest_s = max(self.longest_s, round(length_s, 4))
        bucket = bucket_of(length_s)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1


class RankMinute(msgspec.Struct, array_like=True, frozen=True):
    """Events on one rank from one look at its board to another, about a minute apart: a row of the record `minute`.

    Args:
        from_s, to_s: seconds after the record's ``at_ns``.
        lost: section events that were overwritten before they could be read.
        iterations: number, and seconds after ``at_ns``, of the first and the last one that began; or none.
        sections: by name, also OUT_OF_SECTION and HEARTBEAT; those without an interval are left out.
    """

    rank: Rank
    from_s: Finite
    to_s: Finite
    lost: Count = 0
    iterations: tuple[tuple[Int, Finite], ...] = ()
    sections: dict[str, SectionMinute] = {}

    def __post_init__(self) -> None:
        if self.to_s < self.from_s:
            raise ValueError("a minute ends before it begins")
