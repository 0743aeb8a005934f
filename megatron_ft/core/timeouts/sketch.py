"""Mergeable sketch of the intervals of one section, as monitors keep it. Pure; lengths are seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ft.core.codec import Count, Rank
from megatron_ft.core.timeouts.tail import Short, Tail

MOST_BUCKETS = 6
"""Buckets of one tail. The rule needs only the longest intervals, and a sketch costs less than 200 bytes."""
NO_INTERVAL = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """Intervals of one section in one cycle, of one rank or (merged) of several.

    Args:
        ended: number of intervals that ended; of several ranks, that of the rank with the most.
        longest_s: longest interval that ended; NO_INTERVAL if none did. ``rank`` had it.
        first_s: longest of the first ``FIRST_INTERVALS``; NO_INTERVAL if none ended.
        explained_s: longest interval that outlasted its learned timeout while ranks were seen to make progress. Such
            intervals are not in ``tail``: they were told from a hang.
        open_s: age of the interval that is open now; NO_INTERVAL if none is.
        tail: (bucket, count), by bucket, of all intervals that are neither first ones nor explained.
    """

    ended: Count = 0
    longest_s: Short = NO_INTERVAL
    rank: Rank = 0
    first_s: Short = NO_INTERVAL
    explained_s: Short = NO_INTERVAL
    open_s: Short = NO_INTERVAL
    tail: Tail = ()


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sketch of all these ranks: of each length the most that one rank has seen, not the sum.

    A slow step of a synchronous job is slow on all its ranks, and is one event. Merging twice changes nothing.
    """
    given = list(sketches)
    longest = max(given, key=lambda each: (each.longest_s, -each.rank), default=Sketch())
    return Sketch(
        ended=max((each.ended for each in given), default=0),
        longest_s=longest.longest_s,
        rank=longest.rank,
        first_s=max((each.first_s for each in given), default=NO_INTERVAL),
        explained_s=max((each.explained_s for each in given), default=NO_INTERVAL),
        open_s=max((each.open_s for each in given), default=NO_INTERVAL),
        tail=bounded(_joined([each.tail for each in given])),
    )


def bounded(counts: dict[int, float]) -> Tail:
    """Return the tail of these counts: the shorter intervals are counted as the longest of them."""
    ordered = sorted(counts.items())
    surplus = len(ordered) - MOST_BUCKETS
    if surplus > 0:
        lumped = sum(count for _, count in ordered[: surplus + 1])
        ordered = [(ordered[surplus][0], lumped), *ordered[surplus + 1 :]]
    return tuple((bucket, round(count, 3)) for bucket, count in ordered)


def _joined(tails: list[Tail]) -> dict[int, float]:
    """Merge by the maximum of the survivor counts: how many intervals were at least this long."""
    buckets = sorted({bucket for tail in tails for bucket, _ in tail}, reverse=True)
    counts = [dict(tail) for tail in tails]
    above = [0.0] * len(counts)
    found, longer = {}, 0.0
    for bucket in buckets:
        above = [sum_ + of.get(bucket, 0.0) for sum_, of in zip(above, counts, strict=True)]
        most = max(above)
        if most > longer:
            found[bucket], longer = most - longer, most
    return found
