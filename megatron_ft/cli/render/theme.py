"""Shared parts of both pictures: colours, emphasized hangs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.cli.analysis.failures import Failure
from megatron_ft.cli.analysis.raster import MOST_SECTIONS
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.records.rules.accounting import TimeClass

BACKGROUND, FAULT, WAITS = "#ffffff", "#c1121f", "#f0a994"
_SPECIAL = (BACKGROUND, FAULT, WAITS, "#bfbfbf", "#ececec")  # in the order of the states of raster.py
# Tableau's colours without the red and the grey, which have a meaning here; the first sections get the calmest
_SECTIONS = (
    *("#4e79a7", "#f2b134", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f", "#edc948", "#a0cbe8", "#8cd17d", "#d4a6c8"),
    *("#6b4c9a", "#2f6f6f", "#c49c94", "#86bcb6"),
)
_OTHERS = "#444444"
_ALPHA = "99"
"""Opacity of what is only summed up."""
TIMES = {
    TimeClass.PRODUCTIVE: "#3f8f4f",
    TimeClass.REDONE: "#f2b134",
    TimeClass.SAVE: "#4e79a7",
    TimeClass.LOAD: "#76b7b2",
    TimeClass.LAUNCH: "#7d8590",
    TimeClass.START_UP: "#a9b1ba",
    TimeClass.DETECTION: "#e8743b",
    TimeClass.HUNG: FAULT,
    TimeClass.RESTART: "#b07aa1",
    TimeClass.WAITING: "#d4a6c8",
    TimeClass.PAUSED: "#9c755f",
    TimeClass.AFTER_END: "#cfd4da",
}
"""Colour of each class of the job's time."""


def colors(sections: int) -> list[str]:
    """Return a colour for each state of the raster; some with an opacity."""
    own = [_SECTIONS[index % len(_SECTIONS)] for index in range(min(sections, MOST_SECTIONS))]
    shown = [*own, *([_OTHERS] if sections > MOST_SECTIONS else [])]
    return [*_SPECIAL, *(color for each in shown for color in (each, each + _ALPHA))]


def hung_lines(timeline: Timeline, found: Sequence[Failure]) -> list[tuple[int, float, float]]:
    """Return rank, beginning and end (seconds since the beginning) of the hangs that ended a cycle.

    Among hundreds of ranks, a row alone is too thin to be seen.
    """
    named = {(each.rank, each.cycle) for each in found}
    named |= {(each.rank, each.cycle) for each in timeline.run.accounting.hangs}
    return [
        (track.rank, timeline.since(track.hung_since_ns), timeline.since(track.end_ns))
        for track in timeline.tracks
        if track.hang is not None and (track.rank, track.cycle) in named
    ]
