"""A rank's intervals of a minute, as its monitor sums them up for the event log. Pure; lengths are seconds."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.timeouts.sketch import MOST_LOGGED, NO_INTERVAL, SKETCH_HEAD, Sketch, short, to_wire
from megatron_ft.core.wording import shown

MINUTE_NS = 60_000_000_000
MOST_SPANS = 6
"""Intervals of a section in a minute up to which each is logged with its beginning: a checkpoint, a setup."""
OUT_OF_SECTION = HangKind.OUT_OF_SECTION.value
HEARTBEAT = HangKind.HEARTBEAT.value
"""Name of the intervals between heartbeats."""
_NUMBERS = {int, float}
_HEAD = 5
_SECTION_HEAD = 3 + SKETCH_HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionMinute:
    """Intervals of one section that ended in the minute.

    Args:
        sketch: their lengths, and the age of the one that is open at the minute's end.
        total_s: sum of the lengths.
        depth: other sections open around them.
        spans: beginning, seconds after the record's ``at_ns`` (negative: before), and length of each; empty for more
            than MOST_SPANS.
    """

    sketch: Sketch
    total_s: float = 0.0
    depth: int = 0
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMinute:
    """What happened on one rank from one look at its board to another, about a minute apart.

    Args:
        from_s, to_s: seconds after the record's ``at_ns``.
        lost: section events that were overwritten before they could be read.
        iterations: number, and seconds after ``at_ns``, of the first and the last one that began; or none.
        sections: by name, also OUT_OF_SECTION and HEARTBEAT; those without an interval are left out.
    """

    rank: int
    from_s: float
    to_s: float
    lost: int = 0
    iterations: tuple[tuple[int, float], ...] = ()
    sections: Mapping[str, SectionMinute] = field(default_factory=dict)


def write_row(minute: RankMinute, names: Sequence[str]) -> list[Any]:
    """Return ``[rank, from_s, to_s, lost, [iteration, began_s, ...], section, ...]``, a section for each name.

    A section is ``[depth, total_s, [began_s, length_s, ...], *sketch, bucket, count, count, ...]``, or empty: the
    numbers of `sketch.to_wire`, and the counts from the first bucket on; -n stands for n empty buckets.
    """
    flat = [part for number, at_s in minute.iterations for part in (number, _ms(at_s))]
    head = [minute.rank, _ms(minute.from_s), _ms(minute.to_s), minute.lost, flat]
    return head + [_write_section(minute.sections.get(name)) for name in names]


def read_rows(rows: Sequence[Any], names: Sequence[str]) -> Iterator[RankMinute]:
    """Yield the ranks of a `Minute` record; a malformed row is left out."""
    for row in rows:
        with contextlib.suppress(ProtocolError):
            yield _read_row(row, names)


def _read_row(row: Any, names: Sequence[str]) -> RankMinute:
    if type(row) is not list or len(row) != _HEAD + len(names):
        raise ProtocolError(shown(row))
    rank, from_s, to_s, lost, iterations = row[:_HEAD]
    if type(rank) is not int or type(lost) is not int or min(rank, lost) < 0:
        raise ProtocolError(shown(row))
    if type(iterations) is not list or len(iterations) % 2:
        raise ProtocolError(shown(row))
    _check_numbers([from_s, to_s, *iterations])
    return RankMinute(
        rank=rank,
        from_s=from_s,
        to_s=max(from_s, to_s),
        lost=lost,
        iterations=tuple(zip(map(int, iterations[::2]), iterations[1::2], strict=True)),
        sections={name: _read_section(each) for name, each in zip(names, row[_HEAD:], strict=True) if each},
    )


def _write_section(of: SectionMinute | None) -> list[Any]:
    if of is None:
        return []
    spans = [part for begin_s, length_s in of.spans for part in (_ms(begin_s), short(length_s))]
    tail, following = list[int | float](), 0
    for bucket, count in of.sketch.tail:
        gap = following - bucket
        tail += [gap] if tail and gap else [] if tail else [bucket]
        tail.append(short(count))
        following = bucket + 1
    return [of.depth, short(of.total_s), spans, *to_wire(replace(of.sketch, tail=())), *tail]


def _read_section(flat: Any) -> SectionMinute:
    if type(flat) is not list or len(flat) < _SECTION_HEAD or type(flat[2]) is not list or len(flat[2]) % 2:
        raise ProtocolError(shown(flat))
    depth, total_s, spans, ended, longest_s, rank, first_s, explained_s, open_s = flat[:_SECTION_HEAD]
    _check_numbers([depth, total_s, *spans, *flat[3:]])
    pairs: list[tuple[int, float]] = []
    bucket = 0
    if len(flat) > _SECTION_HEAD:
        bucket = flat[_SECTION_HEAD]
        for number in flat[_SECTION_HEAD + 1 :]:
            if number < 0:
                bucket -= number
            else:
                pairs.append(_pair(bucket, number))
                bucket += 1
    is_sound = (
        type(ended) is type(rank) is type(bucket) is int
        and min(ended, rank, *pairs[0][:1] if pairs else ()) >= 0
        and min(longest_s, first_s, explained_s, open_s) >= NO_INTERVAL
        and len(pairs) <= MOST_LOGGED
    )
    if not is_sound:
        raise ProtocolError(shown(flat))
    return SectionMinute(
        sketch=Sketch(
            ended=ended,
            longest_s=float(longest_s),
            rank=rank,
            first_s=float(first_s),
            explained_s=float(explained_s),
            open_s=float(open_s),
            tail=tuple(pairs),
        ),
        total_s=total_s,
        depth=int(depth),
        spans=tuple(zip(spans[::2], spans[1::2], strict=True)),
    )


@functools.lru_cache(maxsize=1 << 14, typed=True)
def _pair(bucket: int, count: float) -> tuple[int, float]:
    """Return the pair, one object for all ranks and minutes."""
    return bucket, float(count)


def _check_numbers(numbers: list[Any]) -> None:
    """Raise ProtocolError unless all are plain numbers of a sound size.

    A NaN gets past the comparisons, but not past the sum; they keep the sum from an overflow.
    """
    if not set(map(type, numbers)) <= _NUMBERS:
        raise ProtocolError(shown(numbers))
    if not (min(numbers) > -(2.0**40) and max(numbers) < 2.0**53 and math.isfinite(sum(numbers))):
        raise ProtocolError(shown(numbers))


def _ms(seconds: float) -> int | float:
    return short(round(seconds, 3))
