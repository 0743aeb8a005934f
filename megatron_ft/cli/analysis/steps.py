"""Time of a step over the time of a run: of the median rank, and of the slowest one. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_ft.cli.analysis.timeline import FIRST, FIRST_NS, LAST, LAST_NS, Timeline

MOST_POINTS = 400


def step_times(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the mean times from one iteration to the next, in seconds, at most ``MOST_POINTS`` stretches of the run.

    ``at`` is since its beginning, ``rank`` the slowest one. Minutes in which a rank began one iteration tell none.
    """
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
            {
                "at": round(float(at_s[mine].mean()), 1),
                "median": round(float(np.median(step_s[mine])), 4),
                "slowest": round(float(step_s[slowest]), 4),
                "rank": int(ranks[slowest]),
            }
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
