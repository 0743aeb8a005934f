"""Time of a step over the time of a run: of the median rank, and of the slowest one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

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
    # one point for each minute of all ranks, or of several in a long run
    width_s = max(60.0, timeline.since(None) / MOST_POINTS)
    found: dict[int, list[tuple[float, int, float, int]]] = {}
    for track in timeline.tracks:
        for minute in track.minutes:
            of = minute.of.iterations
            if len(of) > 1 and of[-1][0] > of[0][0]:
                (first, begin_s), (last, end_s) = of[0], of[-1]
                at_s = timeline.since(minute.wall_ns((begin_s + end_s) / 2))
                step_s = (end_s - begin_s) / (last - first)
                found.setdefault(int(at_s // width_s), []).append((step_s, track.rank, at_s, last))
    points = []
    for _, told in sorted(found.items()):
        slowest_s, slowest_rank, *_ = max(told)
        points.append(
            StepTime(
                at_s=sum(at_s for _, _, at_s, _ in told) / len(told),
                median_s=median(step_s for step_s, *_ in told),
                slowest_s=slowest_s,
                slowest_rank=slowest_rank,
                iteration=max(last for *_, last in told),
            )
        )
    return points


def iterations_over_time(timeline: Timeline) -> list[tuple[float, int]]:
    """Return moments, seconds after the beginning, and the iteration that began then, as the lowest rank tells it."""
    told = [
        (timeline.since(minute.wall_ns(at_s)), number)
        for track in timeline.tracks
        if track.rank == timeline.ranks[0]
        for minute in track.minutes
        for number, at_s in minute.of.iterations
    ]
    return sorted(told)[:: max(1, len(told) // MOST_POINTS)]
