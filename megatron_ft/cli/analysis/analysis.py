"""Analysis of one run, computed once for all output formats. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.cli.analysis.failures import Failure, Window, failures_of, windows_of
from megatron_ft.cli.analysis.interval_lengths import LoggedInterval, intervals_of, timeouts_in_force
from megatron_ft.cli.analysis.run_summary import RunSummary, summarize_run
from megatron_ft.cli.analysis.slow_rank_summary import SlowRankSummary, slow_ranks_of
from megatron_ft.cli.analysis.timeline import Timeline, build_timeline
from megatron_ft.cli.logs.runs import RunLogs


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """One run; ``intervals`` is empty without sections."""

    summary: RunSummary
    timeline: Timeline
    intervals: tuple[LoggedInterval, ...]
    failures: tuple[Failure, ...]
    windows: tuple[Window, ...]
    slow_ranks: tuple[SlowRankSummary, ...]


def analyze(run: RunLogs) -> Analysis:
    """Return the complete analysis of a run."""
    summary = summarize_run(run)
    timeline = build_timeline(run, summary)
    return Analysis(
        summary=summary,
        timeline=timeline,
        intervals=tuple(intervals_of(timeline, timeouts_in_force(run))),
        failures=tuple(failures_of(timeline)),
        windows=tuple(windows_of(timeline)),
        slow_ranks=tuple(slow_ranks_of(run.records, timeline)),
    )
