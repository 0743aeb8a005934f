"""Timeouts in force beside the observed intervals: how long sections really took, and how much room is left. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.timeline import Timeline, Track, TrackMinute
from megatron_ft.cli.logs.runs import RunLogs
from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.facts import minutes
from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.core.facts.minutes import SectionMinute, middle_of
from megatron_ft.core.facts.monitor import Timeouts

OUT_OF_SECTION = "(out of section)"
HEARTBEATS = "(between heartbeats)"
_LOGGED = {
    minutes.OUT_OF_SECTION: OUT_OF_SECTION,
    minutes.HEARTBEAT: HEARTBEATS,
    HangKind.INITIAL_HEARTBEAT.value: HEARTBEATS,
}
_LIMIT_S = 1e7  # anything longer isn't meant as a limit

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LoggedInterval:
    """One timeout and its observed intervals; times in seconds, None is unknown.

    Args:
        name: section, or OUT_OF_SECTION, or HEARTBEATS.
        timeout_s: in force at the end of the run; the smallest, if ranks differ; None: none, or not logged.
        longest_rank, longest_cycle: rank and cycle of the longest interval.
        median_s, p99_s: to 12 %, where a minute had more than 6 intervals.
        known: share of the recorded time that is known; below 1 for OUT_OF_SECTION after a loss of events, because one
            of the sections may have been open.
        left_out_s: for OUT_OF_SECTION, the longest of the first ones of each cycle, which aren't in ``longest_s``.
        hangs: cycles that ended by it, and hangs that were reported; such an interval isn't an observed one.
    """

    name: str
    timeout_s: float | None
    count: int
    longest_s: float | None
    longest_rank: int | None
    longest_cycle: int | None
    median_s: float | None
    p99_s: float | None
    hangs: int
    known: float = 1.0
    left_out_s: float | None = None

    @property
    def margin(self) -> float | None:
        """Timeout divided by the longest interval; below 1, a longer interval ended no rank."""
        return self.timeout_s / self.longest_s if self.timeout_s and self.longest_s else None


@dataclass
class Lengths:
    """Lengths of many intervals, and how often each was seen; those from a histogram are the middle of a bucket."""

    exact_s: list[float] = field(default_factory=list)
    buckets: dict[int, float] = field(default_factory=dict)

    def add(self, section: SectionMinute) -> None:
        if section.spans:
            self.exact_s += [length_s for _, length_s in section.spans]
            return
        for bucket, count in section.counts.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0.0) + count

    def weighted(self) -> tuple[Floats, Floats]:
        """Return the lengths in seconds, shortest first, and their counts."""
        middle = [middle_of(bucket) for bucket in self.buckets]
        seconds = np.array([*self.exact_s, *middle], dtype=np.float64)
        counts = np.array([*[1.0] * len(self.exact_s), *self.buckets.values()], dtype=np.float64)
        order = np.argsort(seconds, kind="stable")
        return seconds[order], counts[order]

    def quantile(self, share: float, longest_s: float) -> float | None:
        """Return the length that this share of the intervals doesn't exceed; None without any."""
        seconds, counts = self.weighted()
        if not len(seconds):
            return None
        if not self.buckets:
            return float(np.quantile(seconds, share))
        at = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
        return min(float(seconds[min(at, len(seconds) - 1)]), longest_s)


def intervals_of(timeline: Timeline, timeouts: dict[str, float]) -> list[LoggedInterval]:
    """Return a row for each section observed or with a timeout, then out of section and between heartbeats."""
    rows = _rows(timeline)
    names = list(dict.fromkeys((*timeline.names, *timeouts, *rows)))
    special = [name for name in (OUT_OF_SECTION, HEARTBEATS) if name in names]
    known = _known(timeline)
    return [
        (rows.get(name) or _Row(name)).interval(timeline, timeouts.get(name), known)
        for name in [*(name for name in names if name not in special), *special]
    ]


def lengths_of(timelines: Iterable[Timeline], name: str) -> tuple[Floats, Floats]:
    """Return all observed lengths of one name, in seconds, shortest first, and their counts."""
    found = Lengths()
    for timeline in timelines:
        for track in timeline.tracks:
            for _, section in of_section(track, name):
                found.add(section)
    return found.weighted()


def of_section(track: Track, name: str) -> Iterator[tuple[TrackMinute, SectionMinute]]:
    """Yield the minutes of a rank in which intervals of a section ended."""
    logged = next((each for each, shown in _LOGGED.items() if shown == name), name)
    for minute in track.minutes:
        section = minute.of.sections.get(logged)
        if section is not None and section.count:
            yield minute, section


class _Row:
    """All intervals of one name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lengths = Lengths()
        self._count = 0
        self._longest_s = self._first_s = -1.0
        self._longest: Track | None = None

    def add(self, track: Track, section: SectionMinute) -> None:
        self._count += section.count
        self._lengths.add(section)
        self._first_s = max(self._first_s, section.first_s)
        if section.longest_s > self._longest_s:
            self._longest_s, self._longest = section.longest_s, track

    def interval(self, timeline: Timeline, timeout_s: float | None, known: float) -> LoggedInterval:
        is_outside, longest = self._name == OUT_OF_SECTION, self._longest
        return LoggedInterval(
            name=self._name,
            timeout_s=timeout_s,
            count=self._count,
            longest_s=None if longest is None else self._longest_s,
            longest_rank=None if longest is None else longest.rank,
            longest_cycle=None if longest is None else longest.cycle,
            median_s=self._lengths.quantile(0.5, self._longest_s) if longest is not None else None,
            p99_s=self._lengths.quantile(0.99, self._longest_s) if longest is not None else None,
            hangs=_hangs(timeline, self._name),
            known=known if is_outside else 1.0,
            left_out_s=self._first_s if is_outside and self._first_s > 0 else None,
        )


def _rows(timeline: Timeline) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for track in timeline.tracks:
        for minute in track.minutes:
            for logged, section in minute.of.sections.items():
                if section.count:
                    name = _LOGGED.get(logged, logged)
                    if name not in rows:
                        rows[name] = _Row(name)
                    rows[name].add(track, section)
    return rows


def _known(timeline: Timeline) -> float:
    """Return the share of the recorded time in which no event was lost."""
    recorded_s = known_s = 0.0
    for track in timeline.tracks:
        for minute in track.minutes:
            length_s = minute.of.to_s - minute.of.from_s
            recorded_s += length_s
            known_s += 0.0 if minute.of.lost else length_s
    return known_s / recorded_s if recorded_s else 1.0


def _hangs(timeline: Timeline, name: str) -> int:
    """Return the number of hangs in a section: one for each that a cycle ended by, or that was reported."""
    told = timeline.summary.accounting
    causes = [cycle.cause for cycle in told.cycles if cycle.cause is not None]
    sections = [cause.section for cause in causes if cause.kind is CauseKind.HANG]
    sections += [hang.section for hang in told.hangs]
    return sum(_LOGGED.get(section, section) == name for section in sections)


def timeouts_in_force(run: RunLogs) -> dict[str, float]:
    """Return seconds by name, from the last `timeouts` record of each rank; the smallest, if ranks differ.

    Only records of the last cycle that has any count: before, ranks may have had other timeouts.
    """
    told = [timed.record for timed in run.records if isinstance(timed.record, Timeouts)]
    last_cycle = max((record.cycle for record in told), default=None)
    last: dict[int, dict[str, float]] = {}
    for record in told:
        if record.cycle == last_cycle:
            of = {**record.sections, OUT_OF_SECTION: record.out_of_section, HEARTBEATS: record.heartbeat}
            last[record.rank] = {name: value for name, value in of.items() if value and 0 < value < _LIMIT_S}
    found: dict[str, float] = {}
    for timeouts in last.values():
        for name, seconds in timeouts.items():
            found[name] = min(seconds, found.get(name, seconds))
    return found
