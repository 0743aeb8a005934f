"""Timeouts in force beside the observed intervals: how long sections really took, and how much room is left. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.logs.progress import Int64s
from megatron_ft.cli.logs.runs import RunLogs
from megatron_ft.core.board.intervals import STEP
from megatron_ft.core.facts.monitor import Timeouts

OUT_OF_SECTION = "(out of section)"
HEARTBEATS = "(between heartbeats)"
_LIMIT_S = 1e7  # anything longer isn't meant as a limit


@dataclass(frozen=True, kw_only=True)
class LoggedInterval:
    """One timeout and its observed intervals; times in seconds, None is unknown.

    Args:
        name: section, or OUT_OF_SECTION, or HEARTBEATS.
        timeout_s: in force at the end of the run; the smallest, if ranks differ; None: none, or not logged.
        longest_rank, longest_cycle: rank and cycle of the longest interval.
        known: share of the recorded time that is known; below 1 for OUT_OF_SECTION after a loss of events, because one
        of the sections may have been open.
        left_out_s: for OUT_OF_SECTION, the longest time between a rank's first iteration and its first "step".
        hangs: number of ranks ended for it; such an interval isn't an observed one.
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


def intervals_of(timeline: Timeline, timeouts: dict[str, float]) -> list[LoggedInterval]:
    """Return a row for each section observed or with a timeout, then out of section and between heartbeats."""
    names = list(dict.fromkeys((*timeline.names, *timeouts)))
    special = [name for name in (OUT_OF_SECTION, HEARTBEATS) if name in names or any(_pieces(timeline, name))]
    rows = [name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)] + special
    return [_interval(timeline, name, timeouts.get(name)) for name in rows]


def durations_s(timeline: Timeline, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return all observed intervals of one name, in seconds."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(ns for _, ns in _pieces(timeline, name))]) / 1e9


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


def _interval(timeline: Timeline, name: str, timeout_s: float | None) -> LoggedInterval:
    pieces = [(track, ns) for track, ns in _pieces(timeline, name) if len(ns)]
    seconds = np.concatenate([ns for _, ns in pieces]) / 1e9 if pieces else None
    where, longest = max(pieces, key=lambda piece: int(piece[1].max()), default=(None, None))
    return LoggedInterval(
        name=name,
        timeout_s=timeout_s,
        count=0 if seconds is None else len(seconds),
        longest_s=None if longest is None else int(longest.max()) / 1e9,
        longest_rank=None if where is None else where.rank,
        longest_cycle=None if where is None else where.cycle,
        median_s=None if seconds is None else float(np.median(seconds)),
        p99_s=None if seconds is None else float(np.percentile(seconds, 99)),
        hangs=sum(track.hang is not None and judged(track) == name for track in timeline.tracks),
        **(_of_outside(timeline) if name == OUT_OF_SECTION else {}),
    )


def judged(track: Track) -> str:
    """Return the name of what a track's hang was about."""
    assert track.hang is not None
    if track.hang.section is not None:
        return track.hang.section
    return HEARTBEATS if "heartbeat" in track.hang.kind else OUT_OF_SECTION


def ended(timeline: Timeline, track: Track, name: str) -> tuple[Int64s, Int64s]:
    """Return when each interval of a section (or out of section) ended on a rank, and its duration; ns."""
    begin_ns, end_ns = _before_verdict(track, *_intervals(timeline, track, name))
    order = np.argsort(end_ns, kind="stable")
    return end_ns[order], (end_ns - begin_ns)[order]


def _before_verdict(track: Track, begin_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Int64s]:
    """Drop intervals that ended after the verdict: a rank being ended may wake and close its section."""
    if track.hang is None:
        return begin_ns, end_ns
    healthy = end_ns <= track.hang.at_ns
    return begin_ns[healthy], end_ns[healthy]


def _intervals(timeline: Timeline, track: Track, name: str) -> tuple[Int64s, Int64s]:
    """Return beginnings and ends of a section's intervals on a rank, or of those out of section; ns."""
    none = np.empty(0, dtype=np.int64)
    if track.spans is None:
        return none, none
    if name == OUT_OF_SECTION:
        begin_ns, end_ns, _ = _outside(timeline, track)
        return begin_ns, end_ns
    if name not in timeline.names:
        return none, none
    closed = track.spans.closed
    mine = closed.sections == timeline.names.index(name)
    return closed.begin_ns[mine], closed.end_ns[mine]


def _pieces(timeline: Timeline, name: str) -> Iterator[tuple[Track, Int64s]]:
    """Yield each track with intervals of that name, and the durations of healthy ones, ns."""
    for track in timeline.tracks:
        if name == HEARTBEATS:
            if track.spans is not None and len(track.spans.heartbeat_gaps_ns):
                yield track, track.spans.heartbeat_gaps_ns
            continue
        begin_ns, end_ns = _intervals(timeline, track, name)
        if len(begin_ns):
            begin_ns, end_ns = _before_verdict(track, begin_ns, end_ns)
            yield track, end_ns - begin_ns


def _outside(timeline: Timeline, track: Track) -> tuple[Int64s, Int64s, int]:
    """Return beginnings and ends of the times out of section, and the longest one left out, ns.

    The rank's warm-up, from its first iteration to its first "step", is left out, since it may have no timeout. The
    time from the attachment to the first section is included.
    """
    assert track.spans is not None
    begin_ns, end_ns = track.spans.outside
    attached_ns, first_ns = track.attached_ns, track.spans.first_start_ns
    if attached_ns is not None and first_ns is not None and attached_ns < first_ns:
        begin_ns, end_ns = np.insert(begin_ns, 0, attached_ns), np.insert(end_ns, 0, first_ns)
    if not timeline.has_steps or not len(track.spans.iteration_begin_ns) or not len(begin_ns):
        return begin_ns, end_ns, 0
    iteration_ns = int(track.spans.iteration_begin_ns[0])
    first_step_ns = _first_step_ns(timeline, track)
    step_ns = int(end_ns[-1]) + 1 if first_step_ns is None else first_step_ns
    warming_up = (end_ns > iteration_ns) & (begin_ns < step_ns)
    left_out_ns = (end_ns - np.maximum(begin_ns, iteration_ns))[warming_up].max(initial=0)
    end_ns = np.where(warming_up, np.minimum(end_ns, iteration_ns), end_ns)
    kept = ~warming_up | (end_ns > begin_ns)
    return begin_ns[kept], end_ns[kept], int(left_out_ns)


def _first_step_ns(timeline: Timeline, track: Track) -> int | None:
    """Return when "step" was opened for the first time on a rank; None if it never was."""
    if track.spans is None or STEP not in timeline.names:
        return None
    number, closed = timeline.names.index(STEP), track.spans.closed
    first = closed.begin_ns[closed.sections == number][:1]
    return min([*first.tolist(), *(at for section, at in track.still_open() if section == number)], default=None)


def _of_outside(timeline: Timeline) -> dict[str, Any]:
    left_out_ns = recorded_ns = unknown_ns = 0
    for track in timeline.tracks:
        if track.spans is not None:
            left_out_ns = max(left_out_ns, _outside(timeline, track)[2])
            unknown_ns += track.spans.recorded_ns - track.spans.outside_known_ns
            recorded_ns += track.spans.recorded_ns
    return {"known": 1 - unknown_ns / max(1, recorded_ns), "left_out_s": left_out_ns / 1e9 or None}
