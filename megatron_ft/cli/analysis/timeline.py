"""A run as ranks over time: lives of processes, their sections, and events. Pure.

All times are wall ns since the epoch, to compare nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_ft.cli.analysis.run_summary import RunSummary
from megatron_ft.cli.analysis.section_spans import RankSpans, spans_of
from megatron_ft.cli.logs.progress import ProgressEvents, join
from megatron_ft.cli.logs.runs import Clock, RunLogs
from megatron_ft.core.facts import shared
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import CycleStarted, Finding, RankExited
from megatron_ft.core.facts.minutes import HEARTBEAT, OUT_OF_SECTION, RankMinute
from megatron_ft.core.facts.monitor import Attached, Minute, RankGone
from megatron_ft.core.facts.rank import FaultInjected
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.facts.timed import Timed

_Who = tuple[int, int]  # rank and cycle


@dataclass(frozen=True, kw_only=True)
class HangSpan:
    """A verdict that ended a rank; ``section`` is None if no section was open (or by heartbeats)."""

    since_ns: int
    at_ns: int
    section: str | None
    kind: str = "section"


class TrackMinute(NamedTuple):
    """A minute of a rank; ``zero_ns`` is that of its times."""

    zero_ns: int
    of: RankMinute

    @property
    def from_ns(self) -> int:
        return self.wall_ns(self.of.from_s)

    @property
    def to_ns(self) -> int:
        return self.wall_ns(self.of.to_s)

    def wall_ns(self, seconds: float) -> int:
        """Convert one of its times."""
        return self.zero_ns + round(seconds * 1e9)


@dataclass(frozen=True, kw_only=True, eq=False)
class Track:
    """One rank in one cycle.

    Args:
        begin_ns, end_ns: known life of its process; ``end_ns`` may be the end of the logs.
        attached_ns: when its monitor began to watch it; None if no log has it.
        spans: sections among its last events, indices into ``Timeline.names``; None if there are no such records.
        hang: verdict that ended it; None if there was none, or it was only observed.
        minutes: all its intervals, minute by minute.
        numbers: index of each section in ``Timeline.names``.
    """

    rank: int
    cycle: int
    host: str
    begin_ns: int
    end_ns: int
    spans: RankSpans | None
    hang: HangSpan | None
    attached_ns: int | None = None
    minutes: tuple[TrackMinute, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)

    def still_open(self) -> list[tuple[int, int]]:
        """Return section and beginning of spans that ended with the rank."""
        return [] if self.spans is None else list(self.spans.still_open)


@dataclass(frozen=True, kw_only=True)
class CycleLife:
    """Beginning and end of a cycle; ``text`` is its cause, "" if it isn't in the logs."""

    number: int
    begin_ns: int
    end_ns: int
    failed: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event: ``kind`` is "fault", "verdict", "exit" or "finding"; rank None: all or none."""

    at_ns: int
    kind: str
    cycle: int | None
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class EvidenceFile:
    """Evidence saved before a rank was ended; ``file`` is relative to the log directory."""

    at_ns: int
    cycle: int | None
    rank: int | None
    file: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run. ``names``: all sections; ``tracks`` are sorted by cycle, then rank."""

    summary: RunSummary
    begin_ns: int
    end_ns: int
    names: tuple[str, ...]
    tracks: tuple[Track, ...]
    cycles: tuple[CycleLife, ...]
    marks: tuple[Mark, ...]
    evidence: tuple[EvidenceFile, ...]

    @cached_property
    def tracks_by_cycle(self) -> Mapping[int, Sequence[Track]]:
        """Tracks by cycle."""
        found: dict[int, list[Track]] = {}
        for track in self.tracks:
            found.setdefault(track.cycle, []).append(track)
        return found

    @cached_property
    def marks_by_cycle(self) -> Mapping[int | None, Sequence[Mark]]:
        """Marks by cycle; those of no cycle under None."""
        found: dict[int | None, list[Mark]] = {}
        for mark in self.marks:
            found.setdefault(mark.cycle, []).append(mark)
        return found

    @property
    def ranks(self) -> list[int]:
        """All ranks with a track."""
        return sorted({track.rank for track in self.tracks})

    @property
    def lost(self) -> int:
        """Number of events that no monitor could read in time."""
        return sum(minute.of.lost for track in self.tracks for minute in track.minutes)


def build_timeline(run: RunLogs, summary: RunSummary) -> Timeline:
    """Build the timeline of a run; ``summary`` is of the same run."""
    records = run.records
    events, minutes = _events(run), _minutes(records)
    last_ns = [int(each.at_ns[-1]) for _, each in events.values() if len(each.at_ns)]
    end_ns = max((*(each.at_ns for each in records), *last_ns), default=run.opened_wall_ns)
    cycles = _cycles(summary, end_ns)
    tracks = _tracks(records, events, minutes, {cycle.number: cycle for cycle in cycles}, end_ns)
    timed = (name for track in tracks for minute in track.minutes for name in minute.of.sections)
    known = (name for track in tracks if track.spans is not None for name in track.spans.names)
    names = tuple(name for name in dict.fromkeys((*known, *timed)) if name not in (OUT_OF_SECTION, HEARTBEAT))
    begin_ns = min((*(cycle.begin_ns for cycle in cycles), *(track.begin_ns for track in tracks)), default=None)
    return Timeline(
        summary=summary,
        begin_ns=run.begin_ns if begin_ns is None else min(begin_ns, run.begin_ns),
        end_ns=end_ns,
        names=names,
        tracks=tuple(_renumbered(track, names) for track in tracks),
        cycles=tuple(cycles),
        marks=tuple(_marks(records)),
        evidence=tuple(_evidence(records)),
    )


def _events(run: RunLogs) -> dict[_Who, tuple[str, ProgressEvents]]:
    """Return host and events, in wall time, of each rank and cycle."""
    parts: dict[_Who, list[tuple[Clock, ProgressEvents]]] = {}
    for log, clock in zip(run.files, run.clocks, strict=True):
        for part in log.progress:
            parts.setdefault((part.rank, part.cycle), []).append((clock, part))
    found = {}
    for who, of in parts.items():
        clock = of[0][0]
        whole = join([part for its, part in of if its == clock])
        found[who] = (clock.host, replace(whole, at_ns=whole.at_ns + clock.offset_ns))
    return found


def _minutes(records: Iterable[Timed[Record | None]]) -> dict[_Who, list[TrackMinute]]:
    """Return the minutes of each rank and cycle, in order."""
    found: dict[_Who, list[TrackMinute]] = {}
    for timed in records:
        if isinstance(timed.record, Minute):
            zero_ns = timed.wall_ns(timed.record.at_ns)
            for of in timed.record.ranks:
                found.setdefault((of.rank, timed.record.cycle), []).append(TrackMinute(zero_ns, of))
    for minutes in found.values():
        minutes.sort(key=lambda minute: minute.from_ns)
    return found


@dataclass
class _Life:
    """Records of one rank in one cycle, wall ns."""

    host: str = ""
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    attached_ns: int | None = None
    hang: HangSpan | None = None


def _lives(records: Iterable[Timed[Record | None]]) -> dict[_Who, _Life]:
    lives: dict[_Who, _Life] = {}
    for timed in records:
        at_ns, record = timed.at_ns, timed.record
        if isinstance(record, CycleStarted):
            for each in record.ranks:
                lives.setdefault((each.rank, record.cycle), _Life(host=timed.host)).begins.append(at_ns)
        if not isinstance(record, Attached | RankGone | RankExited | RankHung):
            continue
        life = lives.setdefault((record.rank, record.cycle), _Life(host=timed.host))
        if isinstance(record, Attached):
            life.begins.append(at_ns)
            life.attached_ns = at_ns if life.attached_ns is None else life.attached_ns
        elif isinstance(record, RankGone | RankExited):
            life.ends.append(at_ns)
        elif not record.observed_only and life.hang is None:
            since_ns, judged_ns = timed.wall_ns(record.since_ns), timed.wall_ns(record.at_ns)
            life.hang = HangSpan(since_ns=since_ns, at_ns=judged_ns, section=record.section, kind=record.kind)
    return lives


def _tracks(
    records: Sequence[Timed[Record | None]],
    events: Mapping[_Who, tuple[str, ProgressEvents]],
    minutes: Mapping[_Who, Sequence[TrackMinute]],
    cycles: Mapping[int, CycleLife],
    end_of_logs_ns: int,
) -> list[Track]:
    lives = _lives(records)
    tracks = []
    for rank, cycle in sorted({*lives, *events, *minutes}, key=lambda who: (who[1], who[0])):
        life = lives.get((rank, cycle), _Life())
        host, of = events.get((rank, cycle), (life.host, None))
        mine = minutes.get((rank, cycle), ())
        seen = [] if of is None or not len(of.at_ns) else [int(of.at_ns[0]), int(of.at_ns[-1])]
        seen += [mine[0].from_ns] if mine else []
        ended = min(life.ends, default=cycles[cycle].end_ns if cycle in cycles else end_of_logs_ns)
        begun = min([*life.begins, *seen], default=ended)
        tracks.append(
            Track(
                rank=rank,
                cycle=cycle,
                host=host,
                begin_ns=begun,
                end_ns=max([ended, begun, *seen]),
                spans=None if of is None else spans_of(of),
                hang=life.hang,
                attached_ns=life.attached_ns,
                minutes=tuple(mine),
            )
        )
    return tracks


def _renumbered(track: Track, names: Sequence[str]) -> Track:
    """Return the track with sections as indices into ``names``."""
    known = {name: number for number, name in enumerate(names)}
    spans = track.spans
    if spans is not None:
        numbers = np.array([known[name] for name in spans.names] or [0], dtype=np.uint16)
        closed = replace(spans.closed, sections=numbers[spans.closed.sections])
        still_open = tuple((int(numbers[section]), at) for section, at in spans.still_open)
        spans = replace(spans, names=tuple(names), closed=closed, still_open=still_open)
    return replace(track, spans=spans, numbers=known)


def _cycles(summary: RunSummary, end_of_logs_ns: int) -> list[CycleLife]:
    return [
        CycleLife(
            number=cycle.cycle,
            begin_ns=cycle.begin_ns,
            end_ns=end_of_logs_ns if cycle.end_ns is None else cycle.end_ns,
            failed=cycle.outcome == "failed",
            text=cycle.cause.text if cycle.cause else "" if cycle.outcome == "unknown" else cycle.outcome,
        )
        for cycle in summary.cycles
    ]


def _marks(records: Iterable[Timed[Record | None]]) -> Iterable[Mark]:
    said = set()
    for at_ns, record in ((each.at_ns, each.record) for each in records):
        if isinstance(record, FaultInjected):
            yield _mark(at_ns, "fault", record, f"fault injected: {record.type or '?'}")
        elif isinstance(record, RankHung):
            yield _mark(at_ns, "verdict", record, _verdict(record))
        elif isinstance(record, RankExited) and not record.by_us and record.exitcode:
            code = record.exitcode
            how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
            yield _mark(at_ns, "exit", record, f"rank {record.rank} {how}")
        elif isinstance(record, Finding) and (record.cycle, record.text) not in said:
            said.add((record.cycle, record.text))  # every node's launcher may record it
            yield _mark(at_ns, "finding", record, record.text)


def _mark(at_ns: int, kind: str, of: FaultInjected | RankHung | RankExited | Finding, text: str) -> Mark:
    return Mark(at_ns=at_ns, kind=kind, cycle=of.cycle, rank=of.rank, text=text)


def _verdict(verdict: RankHung) -> str:
    where = f"in '{verdict.section}'" if verdict.section else f"({verdict.kind})"
    kind = "learned timeout" if verdict.learned else "timeout"
    text = f"rank {verdict.rank} hung {where} for {verdict.elapsed_s:.1f} s ({kind} {verdict.timeout_s:.1f} s)"
    return text + (", only observed" if verdict.observed_only else "")


def _evidence(records: Iterable[Timed[Record | None]]) -> Iterable[EvidenceFile]:
    for at_ns, record in ((each.at_ns, each.record) for each in records):
        if isinstance(record, shared.Evidence) and record.file:
            yield EvidenceFile(
                at_ns=at_ns, cycle=record.cycle, rank=record.rank, file=record.file, summary=record.summary
            )
