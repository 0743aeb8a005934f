"""A rank's intervals of a minute, as its monitor sums them up for the event log. Pure; lengths are seconds."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

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
_HEAD, _SECTION_HEAD = 5, 7
_NUMBERS = {int, float}


def bucket_of(length_s: float) -> int:
    """Return the bucket of an interval; a length at the end of two is in the lower one."""
    return bisect.bisect_left(BOUNDS_S, length_s)


def middle_of(bucket: int) -> float:
    """Return the length that stands for all in a bucket, to 12 %."""
    return math.sqrt(BOUNDS_S[max(bucket - 1, 0)] * BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)])


@dataclass(slots=True, kw_only=True)
class SectionMinute:
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

    count: int = 0
    total_s: float = 0.0
    longest_s: float = NONE_S
    first_s: float = NONE_S
    open_s: float = NONE_S
    depth: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, begin_s: float, length_s: float, *, depth: int, is_first: bool) -> None:
        """Count an interval."""
        self.count += 1
        self.total_s += length_s
        self.depth = depth
        if len(self.spans) <= MOST_SPANS:
            self.spans.append((begin_s, length_s))
        if is_first:
            self.first_s = max(self.first_s, length_s)
            return
        self.longest_s = max(self.longest_s, length_s)
        bucket = bucket_of(length_s)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1


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

    A section is ``[count, total_s, longest_s, first_s, open_s, depth, [began_s, length_s, ...], bucket, count, ...]``,
    or empty.
    """
    flat = [part for number, at_s in minute.iterations for part in (number, _short(at_s))]
    head = [minute.rank, _short(minute.from_s), _short(minute.to_s), minute.lost, flat]
    return head + [_write_section(minute.sections.get(name)) for name in names]


def _write_section(of: SectionMinute | None) -> list[Any]:
    if of is None:
        return []
    spans = [] if len(of.spans) > MOST_SPANS else [_short(part) for span in of.spans for part in span]
    lengths = map(_short, (of.total_s, of.longest_s, of.first_s, of.open_s))
    return [of.count, *lengths, of.depth, spans, *(part for pair in sorted(of.counts.items()) for part in pair)]


def read_rows(rows: Iterable[Any], names: Sequence[str]) -> Iterator[RankMinute]:
    """Yield the ranks of a `Minute` record; a malformed row is left out."""
    for row in rows:
        with contextlib.suppress(ProtocolError):
            yield _read_row(row, names)


def _read_row(row: Any, names: Sequence[str]) -> RankMinute:
    if type(row) is not list or len(row) != _HEAD + len(names):
        raise ProtocolError(shown(row))
    rank, from_s, to_s, lost, iterations = row[:_HEAD]
    if type(iterations) is not list or len(iterations) % 2 or not _are_counts([rank, lost]):
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


def _read_section(flat: Any) -> SectionMinute:
    if type(flat) is not list or len(flat) < _SECTION_HEAD or len(flat) % 2 != _SECTION_HEAD % 2:
        raise ProtocolError(shown(flat))
    count, total_s, longest_s, first_s, open_s, depth, spans = flat[:_SECTION_HEAD]
    buckets, counts = flat[_SECTION_HEAD::2], flat[_SECTION_HEAD + 1 :: 2]
    if type(spans) is not list or len(spans) % 2 or not _are_counts([count, depth, *buckets, *counts]):
        raise ProtocolError(shown(flat))
    _check_numbers([total_s, longest_s, first_s, open_s, *spans])
    if max(buckets, default=0) > len(BOUNDS_S) or min(longest_s, first_s, open_s) < NONE_S:
        raise ProtocolError(shown(flat))
    return SectionMinute(
        count=count,
        total_s=total_s,
        longest_s=longest_s,
        first_s=first_s,
        open_s=open_s,
        depth=depth,
        spans=list(zip(spans[::2], spans[1::2], strict=True)),
        counts=dict(zip(buckets, counts, strict=True)),
    )


def _are_counts(numbers: list[Any]) -> bool:
    return all(type(each) is int and 0 <= each < 2**53 for each in numbers)


def _check_numbers(numbers: list[Any]) -> None:
    """Raise ProtocolError unless all are plain numbers of a sound size.

    A NaN gets past the comparisons, but not past the sum; they keep the sum from an overflow.
    """
    if not numbers:
        return
    if not set(map(type, numbers)) <= _NUMBERS:
        raise ProtocolError(shown(numbers))
    if not (min(numbers) > -(2.0**40) and max(numbers) < 2.0**53 and math.isfinite(sum(numbers))):
        raise ProtocolError(shown(numbers))


def _short(number: float) -> int | float:
    """Return the number, rounded to 0.1 ms, in the fewest characters."""
    rounded = round(number, 4)
    return int(rounded) if rounded == math.floor(rounded) else rounded
