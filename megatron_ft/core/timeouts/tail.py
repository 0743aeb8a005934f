"""The tail of all intervals seen so far, in few numbers: what a learned timeout is made of. Pure; times are seconds.

A tail counts intervals in buckets of an eighth of an octave, so each length is known to 9 %. What it says is a survivor
count: how many intervals were longer than this. Two are joined by the greater count of each bucket: a slow step of a
synchronous job is slow on all its ranks, and is one. Joining twice changes nothing.

It forgets: every count halves in ``HALF_LIFE`` intervals. What happened once is forgotten after that many, what
happened ``n`` times after about ``HALF_LIFE * log2(2 * n)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

HALF_LIFE = 100_000
"""In intervals of one section."""
_PER_OCTAVE = 8
_SHORTEST_OCTAVE = -10
_OCTAVES = 32
BUCKETS = _PER_OCTAVE * _OCTAVES
"""From a millisecond to 48 days; what is shorter is in the first one, what is longer in the last."""
_NOTHING = 1.0 / 64.0
"""A count below this is forgotten."""


def bucket_of(length_s: float) -> int:
    """The bucket of an interval."""
    if length_s <= 0.0:
        return 0
    number = math.floor(_PER_OCTAVE * (math.log2(length_s) - _SHORTEST_OCTAVE))
    return min(max(number, 0), BUCKETS - 1)


def length_of(bucket: int) -> float:
    """The upper end of a bucket: nothing in it is longer (but for the last one)."""
    return float(2.0 ** (_SHORTEST_OCTAVE + (bucket + 1) / _PER_OCTAVE))


@dataclass
class Tail:
    """The tail of one section, of the time out of section, or of the time between heartbeats."""

    counts: dict[int, float] = field(default_factory=dict)
    """By bucket."""

    @property
    def total(self) -> float:
        """All that is remembered."""
        return math.fsum(self.counts.values())

    def add(self, lengths_s: Iterable[float]) -> None:
        """Count these intervals."""
        for length_s in lengths_s:
            self.count(bucket_of(length_s))

    def count(self, bucket: int, how_many: float = 1.0) -> None:
        """Count this many intervals of this bucket."""
        self.counts[bucket] = self.counts.get(bucket, 0.0) + how_many

    def forget(self, passed: float) -> None:
        """This many intervals have passed: all that was counted before counts less."""
        share = 0.5 ** (passed / HALF_LIFE)
        self.counts = {bucket: n * share for bucket, n in self.counts.items() if n * share >= _NOTHING}

    def longest(self, at_least: float = 0.5, *, below_s: float | None = None) -> float | None:
        """The length that is known to have been reached ``at_least`` times; None if none is.

        ``below_s``: of those that weren't longer than this.
        """
        above = 0.0
        for bucket in sorted(self.counts, reverse=True):
            if below_s is not None and length_of(bucket) > below_s:
                continue
            above += self.counts[bucket]
            if above >= at_least:
                return length_of(bucket)
        return None

    def survivors(self) -> list[float]:
        """For each bucket its count plus those of all longer ones."""
        above, found = 0.0, [0.0] * BUCKETS
        for bucket in range(BUCKETS - 1, -1, -1):
            above += self.counts.get(bucket, 0.0)
            found[bucket] = above
        return found

    def since(self, earlier: Tail) -> Tail:
        """What was counted since this was ``earlier``, if nothing was forgotten since."""
        pairs = zip(self.survivors(), earlier.survivors(), strict=True)
        return Tail.from_survivors([max(0.0, now - before) for now, before in pairs])

    @classmethod
    def from_survivors(cls, survivors: Sequence[float]) -> Tail:
        """The reverse of ``survivors``; also takes the maximum over several ranks."""
        longer = [*survivors[1:], 0.0]
        pairs = enumerate(zip(survivors, longer, strict=True))
        return cls({bucket: count - more for bucket, (count, more) in pairs if count - more >= _NOTHING})

    @classmethod
    def joined(cls, tails: Iterable[Tail]) -> Tail:
        """The tail of what several ranks, or runs that began with the same tail, have observed."""
        columns = zip(*(tail.survivors() for tail in tails), strict=True)
        return cls.from_survivors([max(column) for column in columns])

    def to_counts(self) -> dict[str, float]:
        """For JSON: counts by the number of the bucket, the shortest first."""
        return {str(bucket): round(self.counts[bucket], 3) for bucket in sorted(self.counts)}

    @classmethod
    def from_counts(cls, counts: Mapping[int, float]) -> Tail:
        """The reverse of ``to_counts``; the caller has checked that the keys are buckets."""
        assert all(0 <= bucket < BUCKETS for bucket in counts), counts
        return cls(dict(counts))
