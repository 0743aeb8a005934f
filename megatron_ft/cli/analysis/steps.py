"""Time of a step over the time of a run: of the median rank, and of the slowest one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ft.cli.analysis.timeline import FIRST, FIRST_NS, LAST, LAST_NS, Timeline

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
    rows, tracks = timeline.minutes, timeline.tracks
    ranks = np.repeat([track.rank for track in tracks], [len(track.minutes) for track in tracks])
    several = rows[:, LAST] > rows[:, FIRST]
    rows, ranks = rows[several], ranks[several]
    step_s = (rows[:, LAST_NS] - rows[:, FIRST_NS]) / (rows[:, LAST] - rows[:, FIRST]) / 1e9
    at_s = ((rows[:, FIRST_NS] - timeline.begin_ns) + (rows[:, LAST_NS] - timeline.begin_ns)) / 2e9
    # one point for each minute of all ranks, or of several in a long run
    stretches = at_s // max(60.0, timeline.since(None) / MOST_POINTS)
    points = []
    for stretch in np.unique(stretches):
        (mine,) = np.nonzero(stretches == stretch)
        slowest = mine[step_s[mine].argmax()]
        points.append(
            StepTime(
                at_s=float(at_s[mine].mean()),
                median_s=float(np.median(step_s[mine])),
                slowest_s=float(step_s[slowest]),
                slowest_rank=int(ranks[slowest]),
                iteration=int(rows[mine, LAST].max()),
            )
        )
    return points


def iterations_over_time(timeline: Timeline) -> list[tuple[float, int]]:
    """Return moments, seconds after the beginning, and the iteration that began then, as the lowest rank tells it."""
    told = {
        (timeline.since(at_ns), number)
        for track in timeline.tracks
        if track.rank == timeline.ranks[0]
        for row in track.minutes[track.minutes[:, FIRST_NS] > 0].tolist()
        for number, at_ns in ((row[FIRST], row[FIRST_NS]), (row[LAST], row[LAST_NS]))
    }
    return sorted(told)[:: max(1, len(told) // MOST_POINTS)]
