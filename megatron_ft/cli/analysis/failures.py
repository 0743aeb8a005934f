"""Failures of a run to mark in the pictures, and the window of time to show closely around each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.core.times import earliest

_LEAST_NS = 2_000_000_000
_MOST_NS = 600_000_000_000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause of a failed cycle, and where and when to mark it.

    Args:
        number: from 1, as marked in the picture.
        at_s: seconds since the beginning of the timeline.
        rank: None: all ranks are concerned, or it is unknown.
    """

    number: int
    at_s: float
    cycle: int
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """Window of time around a failure, in wall ns. ``cycle`` is the failed one."""

    cycle: int
    begin_ns: int
    end_ns: int


def failures_of(timeline: Timeline) -> Iterator[Failure]:
    """Yield the failure of each failed cycle, in order, preferring the text of a finding across ranks.

    Marked at the moment of the fault or verdict, on the rank concerned.
    """
    blamed = {cycle.cycle: cycle.cause.rank if cycle.cause else None for cycle in timeline.summary.cycles}
    failed = [cycle for cycle in timeline.cycles if cycle.failed]
    for number, cycle in enumerate(failed, start=1):
        marks = timeline.marks_by_cycle.get(cycle.number, ())
        findings = [mark for mark in marks if mark.kind == "finding"]
        telling = [mark for mark in marks if mark.kind in ("fault", "verdict", "exit") and mark.rank is not None]
        rank = findings[0].rank if findings and findings[0].rank is not None else blamed[cycle.number]
        about = [mark for mark in telling if mark.rank == rank] or telling
        at_ns = about[0].at_ns if about else cycle.end_ns
        said = [cycle.text, *(mark.text for mark in findings if mark.text not in cycle.text)]
        yield Failure(
            number=number,
            at_s=(at_ns - timeline.begin_ns) / 1e9,
            cycle=cycle.number,
            rank=rank if rank is not None or not about else about[0].rank,
            text="; ".join(text for text in said if text),
        )


def found_culprits(timeline: Timeline, cycle: int) -> set[int]:
    """Return the ranks that a finding across ranks names: other overdue ranks of the cycle only wait for them."""
    marks = timeline.marks_by_cycle.get(cycle, ())
    named = [mark.rank for mark in marks if mark.kind == "finding"]
    named += [each.rank for each in timeline.summary.accounting.hangs if each.cycle == cycle and not each.went_on]
    return {rank for rank in named if rank is not None}


def windows_of(timeline: Timeline) -> Sequence[Window]:
    """Return a window for each failed cycle: what happened before it, and until the next cycle was set up."""
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
