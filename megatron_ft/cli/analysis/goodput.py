"""Goodput: share of a run's time in iterations that counted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ft.cli.analysis.cycles import CycleSummary
from megatron_ft.cli.analysis.timeline import Timeline, Track

DEFINITION = (
    "Goodput is the time in iterations that counted, those not done again in a later cycle, over the wall time from "
    "the beginning of the first iteration of the run to the end of its last. An iteration lasts until the next one "
    "begins: checkpoints are in it. It is known only where the monitors recorded iterations."
)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of a run, from the beginning of its first iteration to the end of its last completed one.

    Args:
        wall_s: all of them.
        counted_s: in iterations that were not done again.
        redone_s: in iterations that were completed, and done again in a later cycle.
        iterations: number of iterations that counted.
        redone: number of iterations completed and done again.
    """

    wall_s: float
    counted_s: float
    redone_s: float
    iterations: int
    redone: int

    @property
    def share(self) -> float:
        """Goodput from 0 to 1."""
        return self.counted_s / self.wall_s

    @property
    def down_s(self) -> float:
        """Seconds in unfinished iterations, undetected failures, and restarts."""
        return max(0.0, self.wall_s - self.counted_s - self.redone_s)


@dataclass(frozen=True, kw_only=True)
class _CycleSpan:
    """Iterations of one rank in one cycle, ns; ``end_ns`` is the end of the last *completed* one."""

    begin_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    end_ns: int
    finished: int  # exclusive: the first iteration that wasn't completed

    def begin_of(self, number: int) -> int:
        """Return when this iteration began; if it was lost, the last known one before; at most ``end_ns``."""
        if number >= self.finished:
            return self.end_ns
        at = int(np.searchsorted(self.numbers, number, side="right")) - 1
        return int(self.begin_ns[max(0, at)])


def goodput_of(timeline: Timeline) -> Goodput | None:
    """Return the goodput of a run, by the rank that recorded most iterations of each cycle; None if none did.

    Ranks of a job train in step, so the choice of the rank makes little difference.
    """
    cycles = _cycles(timeline)
    if not cycles:
        return None
    counted_ns = redone_ns = iterations = redone = 0
    later = None
    for cycle in reversed(cycles):
        first = int(cycle.numbers[0])
        again = cycle.finished if later is None else later
        later = first if later is None else min(first, later)
        again = max(first, min(again, cycle.finished))
        split_ns = cycle.begin_of(again)
        counted_ns += split_ns - int(cycle.begin_ns[0])
        redone_ns += cycle.end_ns - split_ns
        iterations += again - first
        redone += cycle.finished - again
    wall_ns = max(cycle.end_ns for cycle in cycles) - int(cycles[0].begin_ns[0])
    if wall_ns <= 0:
        return None
    return Goodput(
        wall_s=wall_ns / 1e9,
        counted_s=counted_ns / 1e9,
        redone_s=redone_ns / 1e9,
        iterations=iterations,
        redone=redone,
    )


def _cycles(timeline: Timeline) -> list[_CycleSpan]:
    """Return the cycles with recorded iterations, in order."""
    found = []
    later: int | None = None
    for summary in reversed(timeline.summary.cycles):
        cycle = _cycle(timeline, summary, later)
        if cycle is not None:
            found.append(cycle)
        if summary.first_iteration is not None:
            later = summary.first_iteration if later is None else min(later, summary.first_iteration)
    return found[::-1]


def _cycle(timeline: Timeline, summary: CycleSummary, later: int | None) -> _CycleSpan | None:
    """Return a cycle's iterations. ``later``: lowest first iteration of later cycles; None without one."""
    tracks = [track for track in timeline.tracks_by_cycle.get(summary.cycle, ()) if _count(track)]
    if not tracks:
        return None
    track = max(tracks, key=lambda track: (_count(track), -track.rank))
    assert track.spans is not None
    begin_ns, numbers = track.spans.iteration_begin_ns, track.spans.iterations
    ascending = np.concatenate([[True], np.diff(np.maximum.accumulate(numbers)) > 0])
    begin_ns, numbers = begin_ns[ascending], numbers[ascending]
    last, last_ns = int(numbers[-1]), int(begin_ns[-1])
    is_last_finished = summary.outcome == "succeeded" if later is None else later > last
    if not is_last_finished:
        return _CycleSpan(begin_ns=begin_ns, numbers=numbers, end_ns=last_ns, finished=last)
    closed_ns = track.spans.last_end_ns
    end_ns = closed_ns if closed_ns is not None and closed_ns > last_ns else track.end_ns
    if track.hang is not None:
        # the rank stood still from then on; woken to be ended, it may even have closed its section
        end_ns = max(last_ns, min(end_ns, track.hang.since_ns))
    return _CycleSpan(begin_ns=begin_ns, numbers=numbers, end_ns=end_ns, finished=last + 1)


def _count(track: Track) -> int:
    return 0 if track.spans is None else len(track.spans.iterations)
