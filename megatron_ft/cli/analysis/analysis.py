"""Analysis of one run, computed once for all output formats. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.cli.analysis.interval_lengths import Interval, intervals_of, observe
from megatron_ft.cli.analysis.timeline import Timeline, Tracks, build_timeline
from megatron_ft.cli.logs.runs import Run
from megatron_ft.link.facts.launcher import CycleEnded, SlowRank
from megatron_ft.link.facts.monitor import Minute


@dataclass(kw_only=True)
class SlowRankSummary:
    """A rank from the moment at which it was named, in seconds.

    Args:
        after_s: since the beginning of the run.
        lasted_s: until it no longer held the others back, or its cycle ended; None if neither is in the logs.
        lag: share of their time that the others waited for it.
        waits: share of its time that it spent in collectives itself.
    """

    cycle: int
    rank: int
    node: str
    after_s: float
    lasted_s: float | None = None
    lag: float
    waits: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """One run; ``intervals`` is empty without sections."""

    run: Run
    timeline: Timeline
    intervals: list[Interval]
    slow_ranks: list[SlowRankSummary]


def analyze(run: Run, observed: dict[str, Interval] | None = None) -> Analysis:
    """Return the complete analysis of a run. ``observed``: intervals of other runs, to which its own are added."""
    tracks, observed = Tracks(), {} if observed is None else observed
    for each in run.stream():
        tracks.take(each)
        if isinstance(each.record, Minute):
            observe(each.record, observed)
    timeline = build_timeline(run, tracks)
    return Analysis(
        run=run,
        timeline=timeline,
        intervals=intervals_of(timeline, observed),
        slow_ranks=slow_ranks_of(timeline),
    )


def slow_ranks_of(timeline: Timeline) -> list[SlowRankSummary]:
    """Return all ranks that were named, in the order of time."""
    found: list[SlowRankSummary] = []
    for each in timeline.run.records:
        record = each.record
        if not isinstance(record, SlowRank | CycleEnded):
            continue
        mine = [slow for slow in found if slow.lasted_s is None and slow.cycle == record.cycle]
        if isinstance(record, SlowRank):
            mine = [slow for slow in mine if slow.rank == record.rank]
        if isinstance(record, CycleEnded) or record.is_over:
            for slow in mine:
                slow.lasted_s = timeline.since(each.at_ns) - slow.after_s
        elif not mine:  # else named again by a launcher that has begun to speak for the job
            found.append(
                SlowRankSummary(
                    cycle=record.cycle,
                    rank=record.rank,
                    node=record.node,
                    after_s=timeline.since(each.at_ns),
                    lag=record.lag,
                    waits=record.waits,
                )
            )
    return found
