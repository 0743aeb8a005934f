"""Failures of a run to mark in the pictures, and the window of time to show closely around each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.cli.analysis.timeline import Timeline

_LEAST_NS = 2_000_000_000
_MOST_NS = 600_000_000_000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause of a failed cycle, and where and when to mark it.

    Args:
        number: from 1, as marked in the picture.
        at_ns: moment of the fault or verdict, wall ns.
        rank: None: all ranks are concerned, or it is unknown.
        from_ns, to_ns: what happened before it, and until the next cycle was set up.
    """

    number: int
    at_ns: int
    cycle: int
    rank: int | None
    text: str
    from_ns: int
    to_ns: int


def failures_of(timeline: Timeline) -> Iterator[Failure]:
    """Yield the failure of each failed cycle, in order, preferring the rank and text of a finding across ranks."""
    cycles, number = timeline.run.cycles, 0
    for index, cycle in enumerate(cycles):
        if cycle.outcome != "failed":
            continue
        number += 1
        over_ns = timeline.end_ns if cycle.end_ns is None else cycle.end_ns
        again_ns = next((each.begin_ns for each in cycles[index + 1 :]), over_ns)
        marks = timeline.marks_of(cycle.cycle)
        findings = [mark for mark in marks if mark.kind == "finding"]
        others = [mark for mark in marks if mark.kind != "finding"]
        rank = cycle.cause.rank if cycle.cause else None
        rank = findings[0].rank if findings and findings[0].rank is not None else rank
        told = [mark for mark in others if mark.rank is not None]
        about = next((mark for mark in told if mark.rank == rank), told[0] if told else None)
        hung_ns = [each.hung_since_ns for each in timeline.tracks if each.cycle == cycle.cycle and each.hung_since_ns]
        begun_ns = min([*hung_ns, *(mark.at_ns for mark in others), over_ns])
        around_ns = min(max(2 * (over_ns - begun_ns), _LEAST_NS), _MOST_NS)
        from_ns = max(timeline.begin_ns, begun_ns - around_ns)
        to_ns = min(timeline.end_ns, max(again_ns, over_ns) + around_ns)
        said = [cycle.text, *(mark.text for mark in findings if mark.text not in cycle.text)]
        yield Failure(
            number=number,
            at_ns=over_ns if about is None else about.at_ns,
            cycle=cycle.cycle,
            rank=about.rank if rank is None and about is not None else rank,
            text="; ".join(text for text in said if text),
            from_ns=from_ns,
            to_ns=max(to_ns, from_ns + 1),
        )


def found_culprits(timeline: Timeline, cycle: int) -> set[int]:
    """Return the ranks that a finding across ranks names: other overdue ranks of the cycle only wait for them."""
    named = [mark.rank for mark in timeline.marks_of(cycle) if mark.kind == "finding"]
    named += [each.rank for each in timeline.run.accounting.hangs if each.cycle == cycle and not each.went_on]
    return {rank for rank in named if rank is not None}
