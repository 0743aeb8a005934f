"""A run as ranks over time: lives of processes, their sections, and events. Pure.

All times are wall ns since the epoch, to compare nodes. Minutes are taken one after the other, and kept as numbers: a
run of a thousand ranks has a hundred thousand of them in an hour and a half.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.logs.runs import Run
from megatron_ft.link.facts import shared
from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.link.facts.launcher import CycleStarted, Finding, RankExited
from megatron_ft.link.facts.minutes import HEARTBEAT, MOST_SPANS, OUT_OF_SECTION, RankMinute
from megatron_ft.link.facts.monitor import Attached, Minute, RankGone
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.link.facts.shared import RankHung

Int64s = npt.NDArray[np.int64]
FROM, TO, FIRST, FIRST_NS, LAST, LAST_NS, SUMMED, SUMMED_NS, LOST = range(9)
"""Columns of ``Track.minutes``: its time; number and beginning of the first and the last iteration, -1 and 0 for none;
number of the section of which only the sum is known, -1 for none, and that sum; number of section events that were
lost."""
_MOST_S, _MOST = 1e9, 2**40
_DEEPEST = 32


@dataclass(kw_only=True, eq=False)
class Track:
    """One rank in one cycle.

    Args:
        begin_ns, end_ns: known life of its process; ``end_ns`` may be the end of the logs. Until all records are
            taken, 0 if none has told.
        verdicts: on this rank, in the order of time.
        spans: beginnings and ends of intervals whose times are known, by depth and number of the section.
        still_open: number of the section, depth and beginning of intervals that ended with the rank.
    """

    rank: int
    cycle: int
    host: str
    begin_ns: int = 0
    end_ns: int = 0
    verdicts: list[Timed[RankHung]] = field(default_factory=list)
    spans: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    still_open: list[tuple[int, int, int]] = field(default_factory=list)
    rows: array[int] = field(default_factory=lambda: array("q"))

    @cached_property
    def minutes(self) -> Int64s:
        """A row for each minute, in the order of time."""
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, LOST + 1)
        return rows[np.argsort(rows[:, FROM], kind="stable")]

    def take(self, of: RankMinute, zero_ns: int, numbers: dict[str, int]) -> None:
        """Take the next minute, whose times begin at ``zero_ns``; ``numbers``: those of all sections."""

        def wall_ns(seconds: float) -> int:
            return zero_ns + round(max(-_MOST_S, min(seconds, _MOST_S)) * 1e9)  # a log may hold anything

        to_ns = wall_ns(of.to_s)
        summed, summed_s = -1, 0.0
        self.still_open = []
        for name, section in of.sections.items():
            if name in (OUT_OF_SECTION, HEARTBEAT):
                continue
            number, depth = numbers.setdefault(name, len(numbers)), min(section.depth, _DEEPEST)
            if section.spans:
                spans = self.spans.setdefault((depth, number), array("q"))
                spans.extend(wall_ns(at_s) for begin_s, long_s in section.spans for at_s in (begin_s, begin_s + long_s))
            if section.open_s >= 0:
                self.still_open.append((number, depth, to_ns - round(min(section.open_s, _MOST_S) * 1e9)))
            if section.count > MOST_SPANS and section.total_s > summed_s:
                summed, summed_s = number, section.total_s
        begun = [(number, wall_ns(at_s)) for number, at_s in of.iterations] or [(-1, 0)]
        sums = summed, round(min(summed_s, _MOST_S) * 1e9), min(of.lost, _MOST)
        self.rows.extend((wall_ns(of.from_s), to_ns, *begun[0], *begun[-1], *sums))

    @cached_property
    def hang(self) -> Timed[RankHung] | None:
        """The verdict that ended the rank, or else the last observed one after which no iteration began."""
        last_ns = self.minutes[:, LAST_NS].max(initial=0)
        ended = [each for each in self.verdicts if not each.record.observed_only]
        standing = [each for each in self.verdicts if each.wall_ns(each.record.at_ns) > last_ns]
        return next(iter(ended), standing[-1] if standing else None)

    @property
    def hung_since_ns(self) -> int | None:
        """Beginning of the interval that ``hang`` is about."""
        return None if self.hang is None else self.hang.wall_ns(self.hang.record.since_ns)


class Tracks:
    """Takes the records of a run in the order of time."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Numbers of the sections."""
        self._tracks: dict[tuple[int, int], Track] = {}

    def _of(self, rank: int, cycle: int, host: str) -> Track:
        if (cycle, rank) not in self._tracks:
            self._tracks[cycle, rank] = Track(rank=rank, cycle=cycle, host=host)
        return self._tracks[cycle, rank]

    def take(self, each: Timed[Record | None]) -> None:
        """Take the next record."""
        match each.record:
            case CycleStarted(cycle=cycle, ranks=ranks):
                for started in ranks:
                    track = self._of(started.rank, cycle, each.host)
                    track.begin_ns = track.begin_ns or each.at_ns
            case Attached(rank=rank, cycle=cycle):
                track = self._of(rank, cycle, each.host)
                track.host, track.begin_ns = each.host, track.begin_ns or each.at_ns
            case Minute(cycle=cycle, ranks=rows, at_ns=at_ns):
                for row in rows:
                    self._of(row.rank, cycle, each.host).take(row, each.wall_ns(at_ns), self.numbers)
            case RankHung() as verdict:
                timed = Timed(each.at_ns, each.offset_ns, each.host, verdict)
                self._of(verdict.rank, verdict.cycle, each.host).verdicts.append(timed)
            case RankGone(rank=rank, cycle=cycle) | RankExited(rank=rank, cycle=cycle):
                track = self._of(rank, cycle, each.host)
                track.end_ns = track.end_ns or each.at_ns

    def whole(self, run: Run) -> tuple[Track, ...]:
        """Return all tracks by cycle, then rank, each with its life."""
        ended = {cycle.cycle: run.end_ns if cycle.end_ns is None else cycle.end_ns for cycle in run.cycles}
        for track in self._tracks.values():
            end_ns = track.end_ns or ended.get(track.cycle, run.end_ns)
            known = [track.begin_ns] if track.begin_ns else []
            track.begin_ns = min([*known, *map(int, track.minutes[:1, FROM])], default=end_ns)
            track.end_ns = max(end_ns, track.begin_ns)
        return tuple(self._tracks[key] for key in sorted(self._tracks))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event: ``kind`` is "fault", "verdict", "exit" or "finding"; rank None: all or none."""

    at_ns: int
    kind: str
    cycle: int | None
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """One run. ``names``: all sections, by their number; ``tracks`` are sorted by cycle, then rank."""

    run: Run
    begin_ns: int
    end_ns: int
    names: tuple[str, ...]
    tracks: tuple[Track, ...]
    marks: tuple[Mark, ...]
    evidence: tuple[Timed[shared.Evidence], ...]

    @cached_property
    def ranks(self) -> list[int]:
        return sorted({track.rank for track in self.tracks})

    @cached_property
    def minutes(self) -> Int64s:
        """The minutes of all tracks, one track after the other."""
        return np.concatenate([np.zeros((0, LOST + 1), np.int64), *(track.minutes for track in self.tracks)])

    @property
    def lost(self) -> int:
        """Number of section events that were overwritten before a monitor could read them."""
        return int(self.minutes[:, LOST].sum())

    def marks_of(self, cycle: int) -> list[Mark]:
        return [mark for mark in self.marks if mark.cycle == cycle]

    def since(self, at_ns: int | None) -> float:
        """Return seconds since the beginning; None is the end of the logs."""
        return ((self.end_ns if at_ns is None else at_ns) - self.begin_ns) / 1e9


def build_timeline(run: Run, found: Tracks) -> Timeline:
    """Build the timeline of a run, all records of which ``found`` has taken."""
    tracks = found.whole(run)
    return Timeline(
        run=run,
        begin_ns=min([run.begin_ns, *(track.begin_ns for track in tracks)]),
        end_ns=run.end_ns,
        names=tuple(found.numbers),
        tracks=tracks,
        marks=tuple(_marks(run)),
        evidence=tuple(
            Timed(each.at_ns, each.offset_ns, each.host, each.record)
            for each in run.records
            if isinstance(each.record, shared.Evidence) and each.record.file
        ),
    )


def _marks(run: Run) -> Iterator[Mark]:
    said: set[tuple[int | None, str]] = set()
    for each in run.records:
        kind, text = "", ""
        match each.record:
            case FaultInjected() as record:
                kind, text = "fault", f"fault injected: {record.type or '?'}"
            case RankHung() as record:
                kind, text = "verdict", _verdict(record)
            case RankExited(by_us=False, exitcode=code) as record if code:
                how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
                kind, text = "exit", f"rank {record.rank} {how}"
            case Finding() as record if (record.cycle, record.text) not in said:
                said.add((record.cycle, record.text))  # every node's launcher may record it
                kind, text = "finding", record.text
            case _:
                continue
        yield Mark(at_ns=each.at_ns, kind=kind, cycle=record.cycle, rank=record.rank, text=text)


def _verdict(verdict: RankHung) -> str:
    where = f"in '{verdict.section}'" if verdict.section else f"({verdict.kind})"
    kind = "learned timeout" if verdict.learned else "timeout"
    text = f"rank {verdict.rank} hung {where} for {verdict.elapsed_s:.1f} s ({kind} {verdict.timeout_s:.1f} s)"
    return text + (", only observed" if verdict.observed_only else "")
