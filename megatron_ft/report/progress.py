"""What ranks did, event by event: the `progress` records of the monitors, as arrays instead of Python numbers.

A run of 512 ranks and 10,000 steps has some 15 million events. As Python ints they would take gigabytes; here an
event takes 11 bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HEARTBEAT", "ITERATION", "SECTION_END", "SECTION_START", "ProgressCollector", "ProgressEvents", "join"]

SECTION_START, SECTION_END, HEARTBEAT, ITERATION = 1, 2, 3, 4
_KIND = 256  # an event's code is kind * 256 + index of the section
_AT_ONCE = 4096  # so many events wait as Python ints before they become arrays: one conversion for many records
_PRECISION_NS = 1000  # the same event may be told a microsecond later by a record that begins elsewhere

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgressEvents:
    """The events of one rank in one cycle, oldest first.

    Args:
        names: of the sections.
        at_ns: when each event was, on the clock of the log they come from.
        kinds: of each event: SECTION_START, SECTION_END, HEARTBEAT or ITERATION (an iteration begins).
        sections: of each event, an index into ``names``; without meaning for the last two kinds.
        iterations: the numbers of the iterations that begin, one for each event of that kind.
        gaps: indices of events right before which others were lost; an index past the end means after the last.
        lost: how many were lost in all.
    """

    rank: int
    cycle: int
    names: tuple[str, ...]
    at_ns: Int64s
    kinds: npt.NDArray[np.uint8]
    sections: npt.NDArray[np.uint16]
    iterations: Int64s
    gaps: tuple[int, ...] = ()
    lost: int = 0


class ProgressCollector:
    """Takes the `progress` records of one log, one by one and in their order."""

    def __init__(self) -> None:
        self.passed_over = 0
        self._missed = False
        self._tracks: dict[tuple[int, int], _Track] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """One record; one that makes no sense is counted in ``passed_over`` at the latest when all is ``finished``."""
        if not _has_shape(record):
            self.passed_over += 1
            self.missing()
            return
        key = (record["rank"], record["cycle"])
        if key not in self._tracks:
            self._tracks[key] = _Track()
            if self._missed:
                self._tracks[key].gap()
        self.passed_over += self._tracks[key].add(record)

    def missing(self) -> None:
        """A record can't be read; nobody knows of which rank and cycle it was: events may be lost in all of them."""
        self._missed = True
        for track in self._tracks.values():
            self.passed_over += track.flush()
            track.gap()

    def finished(self) -> tuple[ProgressEvents, ...]:
        """The events of every rank and cycle in these records."""
        done = []
        for (rank, cycle), track in self._tracks.items():
            self.passed_over += track.flush()
            done.append(track.events(rank, cycle))
        return tuple(done)


def join(parts: Sequence[ProgressEvents]) -> ProgressEvents:
    """The events of one rank and cycle from several logs of the same clock: its monitor was replaced.

    The new monitor goes on where the old one was, and its records say what was lost. What the earlier log has already
    isn't taken again: the old one may have died before it could say how far it was.
    """
    first, *rest = sorted(parts, key=lambda part: int(part.at_ns[0]) if len(part.at_ns) else 0)
    for part in rest:
        first = _join_two(first, part)
    return first


def _join_two(first: ProgressEvents, second: ProgressEvents) -> ProgressEvents:
    if not len(second.at_ns) or not len(first.at_ns):
        return first if len(first.at_ns) else second
    end, fresh = int(first.at_ns[-1]), 0
    if int(second.at_ns[0]) <= end:
        fresh = int(np.searchsorted(second.at_ns, end + _PRECISION_NS, side="right"))
    names = list(dict.fromkeys((*first.names, *second.names)))
    renumbered = np.array([names.index(name) for name in second.names] or [0], dtype=np.uint16)
    old_iterations = int(np.count_nonzero(second.kinds[:fresh] == ITERATION))
    length = len(first.at_ns)
    gaps = [*first.gaps, *(length + gap - fresh for gap in second.gaps if gap >= fresh)]
    return ProgressEvents(
        rank=first.rank,
        cycle=first.cycle,
        names=tuple(names),
        at_ns=np.concatenate([first.at_ns, second.at_ns[fresh:]]),
        kinds=np.concatenate([first.kinds, second.kinds[fresh:]]),
        sections=np.concatenate([first.sections, renumbered[second.sections[fresh:]]]),
        iterations=np.concatenate([first.iterations, second.iterations[old_iterations:]]),
        gaps=tuple(sorted(set(gaps))),
        lost=first.lost + second.lost,
    )


class _Track:
    """The records of one rank and cycle; the newest few still as they came."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._waiting: list[Mapping[str, Any]] = []
        self._events_waiting = 0
        self._length = 0
        self._lost = 0
        self._gaps: list[int] = []
        self._at_ns: list[Int64s] = []
        self._kinds: list[npt.NDArray[np.uint8]] = []
        self._sections: list[npt.NDArray[np.uint16]] = []
        self._iterations: list[Int64s] = []

    def add(self, record: Mapping[str, Any]) -> int:
        """Returns how many records were passed over."""
        self._waiting.append(record)
        self._events_waiting += len(record["code"])
        return self.flush() if self._events_waiting >= _AT_ONCE else 0

    def gap(self) -> None:
        """Events may be lost here; those that wait must have been taken."""
        self._gaps.append(self._length)

    def flush(self) -> int:
        waiting, self._waiting, self._events_waiting = self._waiting, [], 0
        return self._take(waiting)

    def _take(self, records: list[Mapping[str, Any]]) -> int:
        """Make arrays of these; where one of them makes no sense, find it by halving."""
        if not records:
            return 0
        try:
            self._convert(records)
        except (TypeError, ValueError, OverflowError):
            if len(records) == 1:
                # its events are missing now: as if they had been lost
                self.gap()
                return 1
            half = len(records) // 2
            return self._take(records[:half]) + self._take(records[half:])
        return 0

    def _convert(self, records: list[Mapping[str, Any]]) -> None:
        lengths = np.array([len(record["code"]) for record in records], dtype=np.int64)
        codes = _ints([record["code"] for record in records])
        gaps_us = _ints([record["dt_us"] for record in records])
        iterations = _ints([record["iterations"] for record in records])
        kinds = codes // _KIND
        firsts = np.cumsum(lengths) - lengths
        begun = np.concatenate([[0], np.cumsum(kinds == ITERATION)])
        if not np.array_equal(begun[firsts + lengths] - begun[firsts], [len(r["iterations"]) for r in records]):
            raise ValueError("not as many numbers as iterations")
        if len(codes) and (codes.min() < _KIND or codes.max() >= (ITERATION + 1) * _KIND or gaps_us.min() < 0):
            raise ValueError("no such code or time")
        # within a record, times are sums of differences: those of all records at once, less what was before each
        passed = np.concatenate([[0], np.cumsum(gaps_us)])
        origin = np.array([record["from_ns"] for record in records], dtype=np.int64) - passed[firsts] * 1000
        self._gaps += [self._length + int(at) for at, r in zip(firsts, records, strict=True) if r["lost"]]
        self._lost += sum(record["lost"] for record in records)
        self._at_ns.append(passed[1:] * 1000 + np.repeat(origin, lengths))
        self._kinds.append(kinds.astype(np.uint8))
        self._sections.append(self._known_by_name(np.where(kinds <= SECTION_END, codes % _KIND, -1), lengths, records))
        self._iterations.append(iterations)
        self._length += len(codes)

    def _known_by_name(
        self, indices: Int64s, lengths: Int64s, records: Sequence[Mapping[str, Any]]
    ) -> npt.NDArray[np.uint16]:
        """The same sections with our numbers: a list of names may differ from that of the record before."""
        width = int(indices.max(initial=-1)) + 1
        tables: list[list[int]] = []
        table_of_record = []
        last: object = None
        for record in records:
            if not tables or record["names"] != last:
                last = record["names"]
                tables.append(self._table(record["names"], width))
            table_of_record.append(len(tables) - 1)
        if not width:
            return np.zeros(len(indices), dtype=np.uint16)
        tables_by_event = np.repeat(np.array(table_of_record, dtype=np.int64), lengths)
        return np.array(tables, dtype=np.uint16)[tables_by_event, np.maximum(indices, 0)]

    def _table(self, names: Sequence[Any], width: int) -> list[int]:
        """Our number of each of the first ``width`` sections; all get one: those not seen yet may be open, too."""
        for name in names:
            self._names.setdefault(str(name), len(self._names))
        known = [str(name) for name in names[:width]]
        known += [f"section #{index}" for index in range(len(known), width)]
        return [self._names.setdefault(name, len(self._names)) for name in known]

    def events(self, rank: int, cycle: int) -> ProgressEvents:
        none = np.empty(0, dtype=np.int64)
        return ProgressEvents(
            rank=rank,
            cycle=cycle,
            names=tuple(self._names),
            # whole microseconds add up to a little more or less than the next record's beginning
            at_ns=np.maximum.accumulate(np.concatenate([none, *self._at_ns])),
            kinds=np.concatenate([none.astype(np.uint8), *self._kinds]),
            sections=np.concatenate([none.astype(np.uint16), *self._sections]),
            iterations=np.concatenate([none, *self._iterations]),
            gaps=tuple(self._gaps),
            lost=self._lost,
        )


def _ints(lists: Sequence[list[int]]) -> Int64s:
    flat: list[int] = []
    for each in lists:
        flat += each
    return np.array(flat, dtype=np.int64)


def _has_shape(record: Mapping[str, Any]) -> bool:
    """Whether the fields are there and of the right kinds; what is in the lists is seen when they are converted."""
    try:
        wholes = (record["rank"], record["cycle"], record["from_ns"], record["lost"])
        lists = (record["names"], record["dt_us"], record["code"], record["iterations"])
    except KeyError:
        return False
    if {*map(type, wholes)} != {int} or {*map(type, lists)} != {list}:
        return False
    return bool(record["lost"] >= 0) and len(record["dt_us"]) == len(record["code"])
