"""Mergeable sketch of the intervals of one section, as monitors keep it. Pure; lengths are seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from megatron_ft.core.codec import Count, Form, Rank
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.timeouts.tail import Short, Tail
from megatron_ft.core.wording import shown

MOST_BUCKETS = 6
"""Buckets of one tail. The rule needs only the longest intervals, and a sketch costs less than 200 bytes."""
MOST_LOGGED = 16
"""Buckets of a tail in the event log, whose readers want shorter intervals, too: a range of 1 to 4."""
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
# [ended, longest_s, rank, first_s, explained_s, open_s, first bucket, its count, distance to the next bucket, ...]:
# half the bytes and a tenth of the time of an object for each section, of which a coordinator reads 10,000 times 4.

SKETCH_HEAD = 6
_MOST_NUMBER = 2**53
_NUMBERS = {int, float}
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


def from_wire(flat: Any) -> Sketch:
    """Return the sketch of ``to_wire``.

    Raises:
        ProtocolError: it is none.
    """
    if type(flat) is not list or not SKETCH_HEAD <= len(flat) <= SKETCH_HEAD + 2 * MOST_BUCKETS or len(flat) % 2:
        raise ProtocolError(shown(flat))
    if not set(map(type, flat)) <= _NUMBERS or not math.isfinite(sum(flat)):
        raise ProtocolError(shown(flat))
    ended, longest_s, rank, first_s, explained_s, open_s = flat[:SKETCH_HEAD]
    steps, counts = flat[SKETCH_HEAD::2], flat[SKETCH_HEAD + 1 :: 2]
    is_sound = (
        min(flat) >= NO_INTERVAL
        and max(flat) <= _MOST_NUMBER
        and type(ended) is int
        and type(rank) is int
        and type(sum(steps)) is int
        and min(ended, rank, *steps[:1], *counts) >= 0
        and min(steps[1:], default=1) > 0
    )
    if not is_sound:
        raise ProtocolError(shown(flat))
    return Sketch(
        ended=ended,
        longest_s=float(longest_s),
        rank=rank,
        first_s=float(first_s),
        explained_s=float(explained_s),
        open_s=float(open_s),
        tail=tuple(zip(itertools.accumulate(steps), map(float, counts), strict=True)),
    )


def short(number: float) -> int | float:
    """Return the number, rounded to 0.1 ms if it is a length, in the fewest characters."""
    rounded = round(number, 4)
    return int(rounded) if rounded == math.floor(rounded) else rounded


def _read(value: Any) -> dict[str, Sketch]:
    if not isinstance(value, Mapping) or len(value) > MOST_NAMES or not all(map(is_name, value)):
        raise ProtocolError(shown(value))
    return {name: from_wire(flat) for name, flat in value.items()}


def _write(sketches: Mapping[str, Sketch]) -> dict[str, list[int | float]]:
    return {name: to_wire(sketch) for name, sketch in sketches.items()}


Sketches = Annotated[Mapping[str, Sketch], Form(_read, _write)]
"""Sketches by section, and their form in messages."""
