"""`progress` records: the last events of ranks, as arrays instead of Python numbers.

A run of 1,000 ranks and 20 cycles has some 10 million of them. As Python ints they would take gigabytes; here an event
takes 11 bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.core.board.layout import EVENT_END, EVENT_ITERATION, KIND_SHIFT, SECTION_SHIFT
from megatron_ft.core.codec import LATEST_NS, decode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.facts.monitor import Progress

_KIND = 1 << (KIND_SHIFT - SECTION_SHIFT)  # an event's code is kind * 256 + index of the section
_AT_ONCE = 4096  # events waiting as Python ints before they become arrays: one conversion for many records
_PRECISION_NS = 1000  # the same event may be a microsecond later in a record with another beginning

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgressEvents:
    """The events of one rank in one cycle, oldest first.

    Args:
        names: names of the sections.
        at_ns: time of each event, on the clock of its log.
        kinds: EVENT_... of the board's layout for each event; EVENT_ITERATION: an iteration begins.
        sections: index into ``names`` for each event; meaningless for the last two kinds.
        iterations: numbers of the iterations that begin, one for each event of that kind.
        gaps: indices of events right before which others aren't recorded; past the end: after the last.
    """

    rank: int
    cycle: int
    names: tuple[str, ...]
    at_ns: Int64s
    kinds: npt.NDArray[np.uint8]
    sections: npt.NDArray[np.uint16]
    iterations: Int64s
    gaps: tuple[int, ...] = ()


def parse_progress(line: bytes) -> Progress | None:
    """Parse one record; None if anything is wrong: without one of its events, the others mean something else."""
    try:
        record = decode(Progress, line)
    except ProtocolError:
        return None
    return record if len(record.dt_us) == len(record.code) else None


class ProgressCollector:
    """Collects the `progress` records of one log, in order."""

    def __init__(self) -> None:
        self.passed_over = 0
        self._missed = False
        self._tracks: dict[tuple[int, int], _Track] = {}

    def add(self, record: Progress | None) -> None:
        """Add one record, None for one that can't be used. Invalid ones are counted in ``passed_over``, at the latest
        by ``finished``."""
        if record is None:
            self.passed_over += 1
            self.missing()
            return
        key = (record.rank, record.cycle)
        if key not in self._tracks:
            self._tracks[key] = _Track()
            if self._missed:
                self._tracks[key].gap()
        self.passed_over += self._tracks[key].add(record)

    def missing(self) -> None:
        """Note an unreadable record of unknown rank and cycle: events may be lost in all of them."""
        self._missed = True
        for track in self._tracks.values():
            self.passed_over += track.flush()
            track.gap()

    def finished(self) -> tuple[ProgressEvents, ...]:
        """Return the events of every rank and cycle in these records."""
        done = []
        for (rank, cycle), track in self._tracks.items():
            self.passed_over += track.flush()
            done.append(track.events(rank, cycle))
        return tuple(done)


def join(parts: Sequence[ProgressEvents]) -> ProgressEvents:
    """Join the events of one rank and cycle from several logs of the same clock, in the order they were opened.

    Its monitor was replaced. The new one continues where the old one was, and its records count the losses. Events in
    the earlier log aren't taken again: the old monitor may have died before it could note how far it was.
    """
    begins, begin = [], 0
    for part in parts:  # a log without events stays behind the one before it
        begin = int(part.at_ns[0]) if len(part.at_ns) else begin
        begins.append(begin)
    first, *rest = sorted(range(len(parts)), key=begins.__getitem__)
    whole = parts[first]
    for index in rest:
        whole = _join_two(whole, parts[index])
    return whole


def _join_two(first: ProgressEvents, second: ProgressEvents) -> ProgressEvents:
    names = list(dict.fromkeys((*first.names, *second.names)))
    renumbered = np.array([names.index(name) for name in second.names] or [0], dtype=np.uint16)
    fresh = _told_again(first, second, renumbered)
    old_iterations = int(np.count_nonzero(second.kinds[:fresh] == EVENT_ITERATION))
    length = len(first.at_ns)
    # losses among events in both logs stay losses
    gaps = [*first.gaps, *(max(0, length + gap - fresh) for gap in second.gaps)]
    return ProgressEvents(
        rank=first.rank,
        cycle=first.cycle,
        names=tuple(names),
        # the second log may have its first events a little too early
        at_ns=np.maximum.accumulate(np.concatenate([first.at_ns, second.at_ns[fresh:]])),
        kinds=np.concatenate([first.kinds, second.kinds[fresh:]]),
        sections=np.concatenate([first.sections, renumbered[second.sections[fresh:]]]),
        iterations=np.concatenate([first.iterations, second.iterations[old_iterations:]]),
        gaps=tuple(sorted(set(gaps))),
    )


def _told_again(first: ProgressEvents, second: ProgressEvents, renumbered: npt.NDArray[np.uint16]) -> int:
    """Return the number of events at the beginning of the second log that are the last ones of the first.

    A section that closes and another that opens right after it are closer than times are precise: the events themselves
    decide.
    """
    if not len(first.at_ns) or not len(second.at_ns):
        return 0
    end_ns = int(first.at_ns[-1])
    least, most = (
        int(np.searchsorted(second.at_ns, end_ns + shift, side="right")) for shift in (-_PRECISION_NS, _PRECISION_NS)
    )
    for count in range(min(most, len(first.at_ns)), max(least, 1) - 1, -1):
        kinds, sections = second.kinds[:count], renumbered[second.sections[:count]]
        is_same = np.abs(first.at_ns[-count:] - second.at_ns[:count]) <= _PRECISION_NS
        is_same &= (first.kinds[-count:] == kinds) & ((kinds > EVENT_END) | (first.sections[-count:] == sections))
        if is_same.all():
            return count
    # not the same events, or none: decide by times alone
    return int(np.searchsorted(second.at_ns, end_ns, side="left"))


class _Track:
    """Records of one rank and cycle; the newest few are kept as parsed."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._waiting: list[Progress] = []
        self._events_waiting = 0
        self._length = 0
        self._gaps: list[int] = []
        self._at_ns: list[Int64s] = []
        self._kinds: list[npt.NDArray[np.uint8]] = []
        self._sections: list[npt.NDArray[np.uint16]] = []
        self._iterations: list[Int64s] = []

    def add(self, record: Progress) -> int:
        """Add a record. Return the number of records that were passed over."""
        self._waiting.append(record)
        self._events_waiting += len(record.code)
        return self.flush() if self._events_waiting >= _AT_ONCE else 0

    def gap(self) -> None:
        """Note that events may be lost here; waiting records must have been flushed."""
        self._gaps.append(self._length)

    def flush(self) -> int:
        waiting, self._waiting, self._events_waiting = self._waiting, [], 0
        return self._take(waiting)

    def _take(self, records: list[Progress]) -> int:
        """Convert records to arrays, finding an invalid one by halving."""
        if not records:
            return 0
        try:
            self._convert(records)
        except (TypeError, ValueError, OverflowError):
            if len(records) == 1:
                # its events are missing now, as if they had been lost
                self.gap()
                return 1
            half = len(records) // 2
            return self._take(records[:half]) + self._take(records[half:])
        return 0

    def _convert(self, records: list[Progress]) -> None:
        lengths = np.array([len(record.code) for record in records], dtype=np.int64)
        codes = _ints([record.code for record in records])
        gaps_us = _ints([record.dt_us for record in records])
        iterations = _ints([record.iterations for record in records])
        kinds = codes // _KIND
        firsts = np.cumsum(lengths) - lengths
        begun = np.concatenate([[0], np.cumsum(kinds == EVENT_ITERATION)])
        if not np.array_equal(begun[firsts + lengths] - begun[firsts], [len(r.iterations) for r in records]):
            raise ValueError("not as many numbers as iterations")
        if len(codes) and (codes.min() < _KIND or codes.max() >= (EVENT_ITERATION + 1) * _KIND or gaps_us.min() < 0):
            raise ValueError("no such code or time")
        # within a record, times are sums of differences: compute them for all records at once, less what was before
        # each
        if 1000 * round(gaps_us.sum(dtype=np.float64)) > LATEST_NS:
            raise ValueError("such a time is longer than anything runs")
        passed = np.concatenate([[0], np.cumsum(gaps_us)])
        origin = np.array([record.from_ns for record in records], dtype=np.int64) - passed[firsts] * 1000
        at_ns = passed[1:] * 1000 + np.repeat(origin, lengths)
        sections = self._known_by_name(np.where(kinds <= EVENT_END, codes % _KIND, -1), lengths, records)
        gaps = [self._length + int(at) for at, r in zip(firsts, records, strict=True) if r.skipped]
        # nothing can fail from here on: either all of these records are taken, or none
        self._gaps += gaps
        self._at_ns.append(at_ns)
        self._kinds.append(kinds.astype(np.uint8))
        self._sections.append(sections)
        self._iterations.append(iterations)
        self._length += len(codes)

    def _known_by_name(self, indices: Int64s, lengths: Int64s, records: Sequence[Progress]) -> npt.NDArray[np.uint16]:
        """Renumber sections by name: a list of names may differ from that of the record before."""
        width = int(indices.max(initial=-1)) + 1
        tables: list[list[int]] = []
        table_of_record = []
        last: object = None
        for record in records:
            if not tables or record.names != last:
                last = record.names
                tables.append(self._table(record.names, width))
            table_of_record.append(len(tables) - 1)
        if not width:
            return np.zeros(len(indices), dtype=np.uint16)
        tables_by_event = np.repeat(np.array(table_of_record, dtype=np.int64), lengths)
        return np.array(tables, dtype=np.uint16)[tables_by_event, np.maximum(indices, 0)]

    def _table(self, names: Sequence[str], width: int) -> list[int]:
        """Return the numbers of the first ``width`` sections; sections without a name yet may be open, and get one,
        too."""
        for name in names:
            self._names.setdefault(name, len(self._names))
        known = list(names[:width])
        known += [f"section #{index}" for index in range(len(known), width)]
        return [self._names.setdefault(name, len(self._names)) for name in known]

    def events(self, rank: int, cycle: int) -> ProgressEvents:
        none = np.empty(0, dtype=np.int64)
        return ProgressEvents(
            rank=rank,
            cycle=cycle,
            names=tuple(self._names),
            # whole microseconds add up to slightly more or less than the next record's beginning
            at_ns=np.maximum.accumulate(np.concatenate([none, *self._at_ns])),
            kinds=np.concatenate([none.astype(np.uint8), *self._kinds]),
            sections=np.concatenate([none.astype(np.uint16), *self._sections]),
            iterations=np.concatenate([none, *self._iterations]),
            gaps=tuple(self._gaps),
        )


def _ints(lists: Sequence[list[int]]) -> Int64s:
    flat: list[int] = []
    for each in lists:
        flat += each
    if not flat:
        return np.empty(0, dtype=np.int64)
    found = np.array(flat)  # no dtype, which would convert other numbers to integers
    if found.ndim != 1 or found.dtype != np.int64:
        raise ValueError("not a list of whole numbers")
    return found
