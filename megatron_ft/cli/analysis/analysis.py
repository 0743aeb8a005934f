"""Analysis of one run, computed once for all output formats. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.cli.analysis.interval_lengths import Interval, intervals_of, observe
from megatron_ft.cli.analysis.slow_rank_summary import SlowRankSummary, slow_ranks_of
from megatron_ft.cli.analysis.timeline import Timeline, Tracks, build_timeline
from megatron_ft.cli.logs.runs import Run
from megatron_ft.link.facts.monitor import Minute


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
