"""A run as ranks over time: lives of processes, their sections, and events. Pure.

All times are wall ns since the epoch, to compare nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_ft.cli.logs.runs import Run
from megatron_ft.link.facts import shared
from megatron_ft.link.facts.launcher import CycleStarted, Finding, RankExited
from megatron_ft.link.facts.minutes import HEARTBEAT, OUT_OF_SECTION, RankMinute
from megatron_ft.link.facts.monitor import Attached, Minute, RankGone
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.facts.timed import Timed


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


@dataclass(kw_only=True, eq=False)
class Track:
    """One rank in one cycle.

    Args:
        begin_ns, end_ns: known life of its process; ``end_ns`` may be the end of the logs.
        verdicts: on this rank, in the order of time.
        minutes: all its intervals, minute by minute.
    """

    rank: int
    cycle: int
    host: str
    begin_ns: int = 0
    end_ns: int = 0
    verdicts: list[Timed[RankHung]] = field(default_factory=list)
    minutes: list[TrackMinute] = field(default_factory=list)

    @cached_property
    def hang(self) -> RankHung | None:
        """The verdict that ended the rank, or else the last observed one after which no iteration began."""
        last_ns = max((minute.wall_ns(at_s) for minute in self.minutes for _, at_s in minute.of.iterations), default=0)
        standing = [
            each.record
            for each in self.verdicts
            if not each.record.observed_only or each.wall_ns(each.record.at_ns) > last_ns
        ]
        return next((each for each in standing if not each.observed_only), standing[-1] if standing else None)

    @property
    def hung_since_ns(self) -> int | None:
        """Beginning of the interval that ``hang`` is about."""
        return next((each.wall_ns(each.record.since_ns) for each in self.verdicts if each.record is self.hang), None)

    def still_open(self) -> list[tuple[str, int, int]]:
        """Return section, depth and beginning of intervals that ended with the rank."""
        return [
            (name, of.depth, minute.to_ns - round(of.open_s * 1e9))
            for minute in self.minutes[-1:]
            for name, of in minute.of.sections.items()
            if of.open_s >= 0 and name not in (OUT_OF_SECTION, HEARTBEAT)
        ]


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
    """One run. ``names``: all sections; ``tracks`` are sorted by cycle, then rank."""

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
    def lost(self) -> int:
        """Number of section events that were overwritten before a monitor could read them."""
        return sum(minute.of.lost for track in self.tracks for minute in track.minutes)

    def marks_of(self, cycle: int) -> list[Mark]:
        return [mark for mark in self.marks if mark.cycle == cycle]

    def since(self, at_ns: int | None) -> float:
        """Return seconds since the beginning; None is the end of the logs."""
        return ((self.end_ns if at_ns is None else at_ns) - self.begin_ns) / 1e9


def build_timeline(run: Run) -> Timeline:
    """Build the timeline of a run."""
    end_ns = max((each.at_ns for each in run.records), default=run.opened_ns)
    tracks = _tracks(run, end_ns)
    timed = (name for track in tracks for minute in track.minutes for name in minute.of.sections)
    return Timeline(
        run=run,
        begin_ns=min([run.begin_ns, *(track.begin_ns for track in tracks)]),
        end_ns=end_ns,
        names=tuple(name for name in dict.fromkeys(timed) if name not in (OUT_OF_SECTION, HEARTBEAT)),
        tracks=tuple(tracks),
        marks=tuple(_marks(run)),
        evidence=tuple(
            Timed(each.at_ns, each.offset_ns, each.host, each.record)
            for each in run.records
            if isinstance(each.record, shared.Evidence) and each.record.file
        ),
    )


def _tracks(run: Run, end_of_logs_ns: int) -> list[Track]:
    tracks: dict[tuple[int, int], Track] = {}
    begins: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}

    def of(rank: int, cycle: int, host: str) -> tuple[tuple[int, int], Track]:
        key = cycle, rank
        if key not in tracks:
            tracks[key] = Track(rank=rank, cycle=cycle, host=host)
        return key, tracks[key]

    for each in run.records:
        match each.record:
            case CycleStarted(cycle=cycle, ranks=ranks):
                for started in ranks:
                    begins.setdefault(of(started.rank, cycle, each.host)[0], each.at_ns)
            case Attached(rank=rank, cycle=cycle):
                key, track = of(rank, cycle, each.host)
                track.host = each.host
                begins.setdefault(key, each.at_ns)
            case Minute(cycle=cycle, ranks=rows, at_ns=at_ns):
                for row in rows:
                    of(row.rank, cycle, each.host)[1].minutes.append(TrackMinute(each.wall_ns(at_ns), row))
            case RankHung() as verdict:
                _, track = of(verdict.rank, verdict.cycle, each.host)
                track.verdicts.append(Timed(each.at_ns, each.offset_ns, each.host, verdict))
            case RankGone(rank=rank, cycle=cycle) | RankExited(rank=rank, cycle=cycle):
                ends.setdefault(of(rank, cycle, each.host)[0], each.at_ns)
    ended = {cycle.cycle: end_of_logs_ns if cycle.end_ns is None else cycle.end_ns for cycle in run.cycles}
    for key, track in tracks.items():
        track.minutes.sort(key=lambda minute: minute.from_ns)
        end_ns = ends.get(key, ended.get(track.cycle, end_of_logs_ns))
        known = [begins[key]] if key in begins else []
        track.begin_ns = min([*known, *(minute.from_ns for minute in track.minutes[:1])], default=end_ns)
        track.end_ns = max(end_ns, track.begin_ns)
    return [tracks[key] for key in sorted(tracks)]


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
