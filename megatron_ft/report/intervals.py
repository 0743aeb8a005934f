"""The timeouts in force beside what they time: how long sections really took, and how much room is left. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ft.report.progress import Int64s
from megatron_ft.report.runs import RunLogs
from megatron_ft.report.timeline import Timeline, Track

__all__ = ["HEARTBEATS", "OUT_OF_SECTION", "Interval", "durations_s", "intervals_of", "timeouts_in_force"]

OUT_OF_SECTION = "(out of section)"
HEARTBEATS = "(between heartbeats)"
_LIMIT_S = 1e7  # what is longer isn't meant as a limit


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One timeout and what was observed; all times in seconds, None where it isn't known.

    Args:
        name: of the section, or OUT_OF_SECTION, or HEARTBEATS.
        timeout_s: in force at the end of the run; the smallest, where ranks differ; None: none, or not logged.
        longest_rank, longest_cycle: where the longest interval was.
        hangs: how often a rank was ended for it; such an interval isn't among the observed.
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

    @property
    def margin(self) -> float | None:
        """How many times the longest interval fits into the timeout; below 1 it was longer and nobody ended it."""
        return self.timeout_s / self.longest_s if self.timeout_s and self.longest_s else None


def intervals_of(timeline: Timeline, timeouts: dict[str, float]) -> list[Interval]:
    """A row for each section that was seen or has a timeout, then those out of section and between heartbeats."""
    names = list(dict.fromkeys((*timeline.names, *timeouts)))
    special = [name for name in (OUT_OF_SECTION, HEARTBEATS) if name in names or any(_pieces(timeline, name))]
    rows = [name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)] + special
    return [_interval(timeline, name, timeouts.get(name)) for name in rows]


def durations_s(timeline: Timeline, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All observed intervals of one name, in seconds."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(ns for _, ns in _pieces(timeline, name))]) / 1e9


def timeouts_in_force(run: RunLogs) -> dict[str, float]:
    """Seconds by name, from the last `timeouts` record of each rank; the smallest, where ranks differ."""
    last: dict[object, dict[str, float]] = {}
    for _, record in run.records():
        if record.ev == "timeouts":
            sections = record.get("sections")
            of = dict(sections) if isinstance(sections, dict) else {}
            of |= {OUT_OF_SECTION: record.get("out_of_section"), HEARTBEATS: record.get("heartbeat")}
            last[record.get("rank")] = {str(name): value for name, value in of.items() if _is_limit(value)}
    found: dict[str, float] = {}
    for timeouts in last.values():
        for name, seconds in timeouts.items():
            found[name] = min(seconds, found.get(name, seconds))
    return found


def _is_limit(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LIMIT_S


def _interval(timeline: Timeline, name: str, timeout_s: float | None) -> Interval:
    pieces = [(track, ns) for track, ns in _pieces(timeline, name) if len(ns)]
    seconds = np.concatenate([ns for _, ns in pieces]) / 1e9 if pieces else None
    where, longest = max(pieces, key=lambda piece: int(piece[1].max()), default=(None, None))
    return Interval(
        name=name,
        timeout_s=timeout_s,
        count=0 if seconds is None else len(seconds),
        longest_s=None if longest is None else int(longest.max()) / 1e9,
        longest_rank=None if where is None else where.rank,
        longest_cycle=None if where is None else where.cycle,
        median_s=None if seconds is None else float(np.median(seconds)),
        p99_s=None if seconds is None else float(np.percentile(seconds, 99)),
        hangs=sum(track.hang is not None and _judged(track) == name for track in timeline.tracks),
    )


def _judged(track: Track) -> str:
    assert track.hang is not None
    if track.hang.section is not None:
        return track.hang.section
    return HEARTBEATS if "heartbeat" in track.hang.kind else OUT_OF_SECTION


def _pieces(timeline: Timeline, name: str) -> Iterator[tuple[Track, Int64s]]:
    """For each track its intervals of one name, ns."""
    number = timeline.names.index(name) if name in timeline.names else None
    for track in timeline.tracks:
        if track.spans is None:
            continue
        if name == HEARTBEATS:
            if len(track.spans.heartbeat_gaps_ns):
                yield track, track.spans.heartbeat_gaps_ns
        elif name == OUT_OF_SECTION:
            begin_ns, end_ns = track.spans.outside
            if len(begin_ns):
                yield track, _before_verdict(track, begin_ns, end_ns)
        elif number is not None:
            mine = track.spans.closed.sections == number
            if mine.any():
                yield track, _before_verdict(track, track.spans.closed.begin_ns[mine], track.spans.closed.end_ns[mine])


def _before_verdict(track: Track, begin_ns: Int64s, end_ns: Int64s) -> Int64s:
    """A rank that is being ended may wake and close its section: that isn't how long it takes."""
    took = end_ns - begin_ns
    return took if track.hang is None else took[end_ns <= track.hang.at_ns]
