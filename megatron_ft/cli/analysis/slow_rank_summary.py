"""Ranks that held the others back in a run, with the section in which they differ most from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import CycleEnded, SlowRank
from megatron_ft.core.facts.timed import Timed


@dataclass(frozen=True, kw_only=True)
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
    lasted_s: float | None
    lag: float
    waits: float
    section: str = ""
    section_s: float | None = None
    others_s: float | None = None


def slow_ranks_of(records: Iterable[Timed[Record | None]], timeline: Timeline) -> list[SlowRankSummary]:
    """Return all ranks that were named, in the order of time."""
    open_: dict[tuple[int, int], tuple[SlowRank, int]] = {}
    found: list[SlowRankSummary] = []

    def close(key: tuple[int, int], end_ns: int | None) -> None:
        if key not in open_:
            return
        record, begin_ns = open_.pop(key)
        lasted_s = None if end_ns is None else (end_ns - begin_ns) / 1e9
        found.append(_summary(record, (begin_ns - timeline.begin_ns) / 1e9, lasted_s, timeline))

    for each in records:
        match each.record:
            case SlowRank(is_over=True) as record:
                close((record.cycle, record.rank), each.at_ns)
            case SlowRank() as record:  # again by a launcher that has begun to speak for the job
                open_.setdefault((record.cycle, record.rank), (record, each.at_ns))
            case CycleEnded(cycle=cycle):
                for key in [key for key in open_ if key[0] == cycle]:
                    close(key, each.at_ns)
    for key in list(open_):
        close(key, None)
    return sorted(found, key=lambda each: each.after_s)


def _summary(record: SlowRank, after_s: float, lasted_s: float | None, timeline: Timeline) -> SlowRankSummary:
    section, own_s, others_s = _differs_most(record, timeline.tracks) or ("", None, None)
    return SlowRankSummary(
        cycle=record.cycle,
        rank=record.rank,
        node=record.node,
        after_s=after_s,
        lasted_s=lasted_s,
        lag=record.lag,
        waits=record.waits,
        section=section,
        section_s=own_s,
        others_s=others_s,
    )


def _differs_most(record: SlowRank, tracks: Iterable[Track]) -> tuple[str, float, float] | None:
    """Return the section, its mean on that rank, and on the others; None if it takes longer in none."""
    totals: dict[str, dict[int, tuple[float, int]]] = {}
    for track in tracks:
        if track.cycle != record.cycle:
            continue
        for minute in track.minutes:
            for name, section in minute.of.sections.items():
                seconds, count = totals.setdefault(name, {}).get(track.rank, (0.0, 0))
                totals[name][track.rank] = seconds + section.total_s, count + section.count
    found: list[tuple[float, str, float, float]] = []
    for name, by_rank in totals.items():
        seconds, count = by_rank.pop(record.rank, (0.0, 0))
        means = [total_s / ended for total_s, ended in by_rank.values() if ended]
        if count and means:
            own_s, others_s = seconds / count, median(means)
            found.append(((own_s - others_s) * count, name, own_s, others_s))
    if not found or max(found)[0] <= 0:
        return None
    return max(found)[1:]
