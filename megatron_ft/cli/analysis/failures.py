"""Which failures of a run the pictures mark and name. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.cli.analysis.timeline import Timeline

__all__ = ["Failure", "failures_of"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a cycle ended that failed, and where and when that is to be marked.

    Args:
        number: from 1, as it is marked in the picture.
        at_s: seconds since the beginning of the timeline.
        rank: None: it concerns all, or it isn't known.
    """

    number: int
    at_s: float
    cycle: int
    rank: int | None
    text: str


def failures_of(timeline: Timeline) -> Iterator[Failure]:
    """Why each cycle ended that failed, in the order of cycles; the finding across ranks says it best, if there is one.

    Marked at the fault's or verdict's moment on the rank that it is about.
    """
    blamed = {cycle.cycle: cycle.rank for cycle in timeline.summary.cycles}
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
