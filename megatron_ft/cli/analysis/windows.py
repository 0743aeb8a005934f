"""Around each failure, the stretch of time that a person wants to see closely. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.core.times import earliest

__all__ = ["Window", "windows_of"]

_LEAST_NS = 2_000_000_000
_MOST_NS = 600_000_000_000


@dataclass(frozen=True, kw_only=True)
class Window:
    """Wall ns; ``cycle`` is the one that failed."""

    cycle: int
    begin_ns: int
    end_ns: int


def windows_of(timeline: Timeline) -> Sequence[Window]:
    """One for each cycle that failed: what happened before it, and until the next cycle was set up."""
    found = []
    later_ns: int | None = None
    for cycle in reversed(timeline.cycles):
        again_ns = cycle.end_ns if later_ns is None else later_ns
        later_ns = earliest(later_ns, cycle.begin_ns)
        if not cycle.failed:
            continue
        tracks, marks = timeline.tracks_by_cycle.get(cycle.number, ()), timeline.marks_by_cycle.get(cycle.number, ())
        hangs_ns = [track.hang.since_ns for track in tracks if track.hang]
        marks_ns = [mark.at_ns for mark in marks if mark.kind != "finding"]
        begun_ns = min([*hangs_ns, *marks_ns, cycle.end_ns])
        around_ns = min(max(2 * (cycle.end_ns - begun_ns), _LEAST_NS), _MOST_NS)
        begin_ns = max(timeline.begin_ns, begun_ns - around_ns)
        end_ns = min(timeline.end_ns, max(again_ns, cycle.end_ns) + around_ns)
        found.append(Window(cycle=cycle.number, begin_ns=begin_ns, end_ns=max(end_ns, begin_ns + 1)))
    return found[::-1]
