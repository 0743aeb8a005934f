"""Histogram of the lengths of intervals, with eight buckets per octave: each length is known to 9 %. Pure; seconds."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

HALF_LIFE = 100_000
"""Every count halves in this many intervals, from one cycle to the next."""
_PER_OCTAVE = 8
_SHORTEST_OCTAVE = -10
_OCTAVES = 32
BUCKETS = _PER_OCTAVE * _OCTAVES
"""From a millisecond to 48 days; shorter lengths are in the first one, longer ones in the last."""


Tail = tuple[tuple[Annotated[int, Meta(ge=0, le=BUCKETS - 1)], Annotated[float, Meta(ge=-1, le=2**62)]], ...]
"""(bucket, count) pairs, by bucket."""


def bucket_of(length_s: float) -> int:
    """Return the bucket of an interval."""
    if length_s <= 0.0:
        return 0
    number = math.floor(_PER_OCTAVE * (math.log2(length_s) - _SHORTEST_OCTAVE))
    return min(max(number, 0), BUCKETS - 1)


def length_of(bucket: int) -> float:
    """Return the upper end of a bucket: nothing in it is longer (but for the last one)."""
    return float(2.0 ** (_SHORTEST_OCTAVE + (bucket + 1) / _PER_OCTAVE))


def longest(tail: Tail, at_least: float = 0.5) -> float | None:
    """Return the length that was reached ``at_least`` times; None if none was."""
    above = 0.0
    for bucket, count in sorted(tail, reverse=True):
        above += count
        if above >= at_least:
            return length_of(bucket)
    return None


def share_left(passed: float, half_life: float) -> float:
    """Return what is left of a count after this many intervals."""
    return float(0.5 ** min(passed / half_life, 1000.0))
