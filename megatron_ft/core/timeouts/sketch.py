"""Mergeable sketch of the intervals of one section, as monitors keep it. Pure; lengths are seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from megatron_ft.core.codec import Count, Message, Rank
from megatron_ft.core.timeouts.tail import Tail

MOST_BUCKETS = 6
"""Buckets of one tail. The rule needs only the longest intervals, and a sketch costs less than 200 bytes."""
MOST_LOGGED = 16
"""Buckets of a tail in the event log, whose readers want shorter intervals, too: a range of 1 to 4."""
NO_INTERVAL = -1.0
Length = Annotated[float, Meta(ge=NO_INTERVAL, le=2**53)]


class Sketch(Message, frozen=True, kw_only=True, array_like=True):
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
    longest_s: Length = NO_INTERVAL
    rank: Rank = 0
    first_s: Length = NO_INTERVAL
    explained_s: Length = NO_INTERVAL
    open_s: Length = NO_INTERVAL
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


def add_up(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sketch of one rank's intervals in several stretches of time, of which the last comes last."""
    given = list(sketches)
    counts: dict[int, float] = {}
    for each in given:
        for bucket, count in each.tail:
            counts[bucket] = counts.get(bucket, 0.0) + count
    whole = merge(given)
    return replace(
        whole,
        ended=sum(each.ended for each in given),
        open_s=given[-1].open_s if given else NO_INTERVAL,
        tail=bounded(counts, MOST_LOGGED),
    )


def bounded(counts: dict[int, float], most: int = MOST_BUCKETS) -> Tail:
    """Return the tail of these counts: the shorter intervals are counted as the longest of them."""
    ordered = sorted(counts.items())
    surplus = len(ordered) - most
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


# -- on the wire ------------------------------------------------------------------------------------------------
# `Sketch` itself is an array: half the bytes and a tenth of the time of an object for each section, of which a
# coordinator reads 10,000 times 4. In the rows of a `Minute` it is flat.

SKETCH_HEAD = 6
MOST_NAMES = 72 + 3
"""In one message: all sections of a board, OUT_OF_SECTION, and the two kinds of heartbeats."""
_NAME_BYTES = 64


def is_name(name: str) -> bool:
    """Return True if a section may be called that."""
    return 0 < len(name.encode(errors="replace")) < _NAME_BYTES


def to_wire(sketch: Sketch) -> list[int | float]:
    """Return the sketch as plain numbers; lengths are rounded to 0.1 ms."""
    lengths = [short(each) for each in (sketch.longest_s, sketch.first_s, sketch.explained_s, sketch.open_s)]
    flat: list[int | float] = [sketch.ended, lengths[0], sketch.rank, *lengths[1:]]
    before = 0
    for bucket, count in sketch.tail:
        flat += (bucket - before, short(count))
        before = bucket
    return flat


def short(number: float) -> int | float:
    """Return the number, rounded to 0.1 ms if it is a length, in the fewest characters."""
    rounded = round(number, 4)
    return int(rounded) if rounded == math.floor(rounded) else rounded


SectionName = Annotated[str, Meta(min_length=1, max_length=_NAME_BYTES - 1)]
Sketches = Annotated[Mapping[SectionName, Sketch], Meta(max_length=MOST_NAMES)]
"""Sketches by section, and their form in messages."""
