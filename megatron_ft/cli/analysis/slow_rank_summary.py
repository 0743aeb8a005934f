"""Ranks that held the others back in a run, with the section in which they differ most from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.link.facts.launcher import CycleEnded, SlowRank


@dataclass(kw_only=True)
class SlowRankSummary:
    """A rank from the moment at which it was named, in seconds.

    Args:
        after_s: since the beginning of the run.
        lasted_s: until it no longer held the others back, or its cycle ended; None if neither is in the logs.
        lag: share of their time that the others waited for it.
        waits: share of its time that it spent in collectives itself.
        section: section whose intervals add up to the most time beyond that of the others; "" without one.
        section_s, others_s: mean length of it on this rank, and the median of the others' means.
    """

    cycle: int
    rank: int
    node: str
    after_s: float
    lasted_s: float | None = None
    lag: float
    waits: float
    section: str = ""
    section_s: float | None = None
    others_s: float | None = None


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
            found.append(_named(record, timeline, each.at_ns))
    return found


def _named(record: SlowRank, timeline: Timeline, at_ns: int) -> SlowRankSummary:
    """Return the summary, with the section that takes longer on that rank than on the others."""
    totals: dict[str, dict[int, tuple[float, int]]] = {}
    for track in timeline.tracks:
        for name, total in track.totals.items() if track.cycle == record.cycle else ():
            totals.setdefault(name, {})[track.rank] = total
    slow = SlowRankSummary(
        cycle=record.cycle,
        rank=record.rank,
        node=record.node,
        after_s=timeline.since(at_ns),
        lag=record.lag,
        waits=record.waits,
    )
    most_s = 0.0
    for name, by_rank in totals.items():
        seconds, count = by_rank.pop(record.rank, (0.0, 0))
        means = [total_s / ended for total_s, ended in by_rank.values() if ended]
        if count and means and seconds - median(means) * count > most_s:
            most_s = seconds - median(means) * count
            slow.section, slow.section_s, slow.others_s = name, seconds / count, median(means)
    return slow
