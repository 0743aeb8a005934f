"""A run as ranks over time: lives of processes, their sections, and events. Pure.

All times are wall ns since the epoch, to compare nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_ft.cli.analysis.run_summary import RunSummary
from megatron_ft.cli.logs.runs import RunLogs
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
    """A verdict on a rank, which it ``ends`` or only reports; ``section`` is None if no section was overdue."""

    since_ns: int
    at_ns: int
    section: str | None
    kind: str = "section"
    ends: bool = True


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
        hang: verdict that ended it, or was only observed and after which nothing moved; None if there was none.
        minutes: all its intervals, minute by minute.
    """

    rank: int
    cycle: int
    host: str
    begin_ns: int
    end_ns: int
    hang: HangSpan | None
    minutes: tuple[TrackMinute, ...] = ()

    def still_open(self) -> list[tuple[str, int, int]]:
        """Return section, depth and beginning of intervals that ended with the rank."""
        last = self.minutes[-1] if self.minutes else None
        sections = {} if last is None else last.of.sections
        return [
            (name, of.depth, last.to_ns - round(of.open_s * 1e9))
            for name, of in sections.items()
            if last is not None and of.open_s >= 0 and name not in (OUT_OF_SECTION, HEARTBEAT)
        ]


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
    end_ns = max((each.at_ns for each in records), default=run.opened_wall_ns)
    cycles = _cycles(summary, end_ns)
    tracks = _tracks(records, {cycle.number: cycle for cycle in cycles}, end_ns)
    timed = (name for track in tracks for minute in track.minutes for name in minute.of.sections)
    return Timeline(
        summary=summary,
        begin_ns=min([run.begin_ns, *(track.begin_ns for track in tracks)]),
        end_ns=end_ns,
        names=tuple(name for name in dict.fromkeys(timed) if name not in (OUT_OF_SECTION, HEARTBEAT)),
        tracks=tuple(tracks),
        cycles=tuple(cycles),
        marks=tuple(_marks(records)),
        evidence=tuple(_evidence(records)),
    )


@dataclass
class _Life:
    """Records of one rank in one cycle, wall ns."""

    host: str = ""
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    hangs: list[HangSpan] = field(default_factory=list)
    minutes: list[TrackMinute] = field(default_factory=list)

    @property
    def hang(self) -> HangSpan | None:
        """The verdict that ended the rank, or else the last observed one after which no iteration began."""
        begun = (minute.wall_ns(at_s) for minute in self.minutes for _, at_s in minute.of.iterations)
        last_ns = max(begun, default=0)
        standing = [each for each in self.hangs if not each.ends and each.at_ns > last_ns]
        return next((each for each in self.hangs if each.ends), standing[-1] if standing else None)


def _lives(records: Iterable[Timed[Record | None]]) -> dict[_Who, _Life]:
    lives: dict[_Who, _Life] = {}
    for timed in records:
        at_ns, record = timed.at_ns, timed.record
        if isinstance(record, CycleStarted):
            for each in record.ranks:
                lives.setdefault((each.rank, record.cycle), _Life(host=timed.host)).begins.append(at_ns)
        elif isinstance(record, Minute):
            zero_ns = timed.wall_ns(record.at_ns)
            for of in record.ranks:
                life = lives.setdefault((of.rank, record.cycle), _Life(host=timed.host))
                life.minutes.append(TrackMinute(zero_ns, of))
        elif isinstance(record, Attached | RankGone | RankExited | RankHung):
            life = lives.setdefault((record.rank, record.cycle), _Life(host=timed.host))
            if isinstance(record, Attached):
                life.host = timed.host
                life.begins.append(at_ns)
            elif isinstance(record, RankGone | RankExited):
                life.ends.append(at_ns)
            else:
                hang = HangSpan(
                    since_ns=timed.wall_ns(record.since_ns),
                    at_ns=timed.wall_ns(record.at_ns),
                    section=record.section,
                    kind=record.kind,
                    ends=not record.observed_only,
                )
                life.hangs.append(hang)
    return lives


def _tracks(
    records: Sequence[Timed[Record | None]], cycles: Mapping[int, CycleLife], end_of_logs_ns: int
) -> list[Track]:
    tracks = []
    for (rank, cycle), life in sorted(_lives(records).items(), key=lambda each: (each[0][1], each[0][0])):
        minutes = sorted(life.minutes, key=lambda minute: minute.from_ns)
        ended = min(life.ends, default=cycles[cycle].end_ns if cycle in cycles else end_of_logs_ns)
        begun = min([*life.begins, *(minute.from_ns for minute in minutes[:1])], default=ended)
        tracks.append(
            Track(
                rank=rank,
                cycle=cycle,
                host=life.host,
                begin_ns=begun,
                end_ns=max(ended, begun),
                hang=life.hang,
                minutes=tuple(minutes),
            )
        )
    return tracks


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
