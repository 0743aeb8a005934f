"""Time of a step over the time of a run: of the median rank, and of the slowest one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ft.cli.analysis.timeline import Timeline

MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Mean time from one iteration to the next in a stretch of the run, ``at_s`` seconds after its beginning."""

    at_s: float
    median_s: float
    slowest_s: float
    slowest_rank: int
    iteration: int


def step_times(timeline: Timeline) -> list[StepTime]:
    """Return the step times, at most ``MOST_POINTS``; minutes in which a rank began one iteration tell none."""
    found = [
        (
            (of[0][1] + of[-1][1]) / 2 + minute.zero_ns / 1e9,
            (of[-1][1] - of[0][1]) / (of[-1][0] - of[0][0]),
            track.rank,
            of[-1][0],
        )
        for track in timeline.tracks
        for minute in track.minutes
        if len(of := minute.of.iterations) > 1 and of[-1][0] > of[0][0]
    ]
    if not found:
        return []
    at_s, seconds, ranks, iterations = (np.array(each) for each in zip(*found, strict=True))
    at_s -= timeline.begin_ns / 1e9
    # one point for each minute of all ranks, or of several in a long run
    width_s = max(60.0, (timeline.end_ns - timeline.begin_ns) / 1e9 / MOST_POINTS)
    bins = (at_s // width_s).astype(np.int64)
    points = []
    for each in np.unique(bins):
        inside = np.flatnonzero(bins == each)
        slowest = inside[seconds[inside].argmax()]
        points.append(
            StepTime(
                at_s=float(at_s[inside].mean()),
                median_s=float(np.median(seconds[inside])),
                slowest_s=float(seconds[slowest]),
                slowest_rank=int(ranks[slowest]),
                iteration=int(iterations[inside].max()),
            )
        )
    return points


def iterations_over_time(timeline: Timeline) -> list[tuple[float, int]]:
    """Return moments, seconds after the beginning, and the iteration that began then, as the lowest rank tells it."""
    lowest = timeline.ranks[:1]
    told = [
        ((minute.wall_ns(at_s) - timeline.begin_ns) / 1e9, number)
        for track in timeline.tracks
        if track.rank in lowest
        for minute in track.minutes
        for number, at_s in minute.of.iterations
    ]
    return sorted(told)[:: max(1, len(told) // MOST_POINTS)]
