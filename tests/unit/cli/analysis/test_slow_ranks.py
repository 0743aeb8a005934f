"""Slow ranks of a run, from the records of launchers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ft.cli.analysis.analysis import slow_ranks_of
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.link.facts.all_kinds import Timed
from megatron_ft.link.facts.launcher import CycleEnded, SlowRank

S = 1_000_000_000


def slow(rank: int = 1, cycle: int = 0, *, is_over: bool = False) -> SlowRank:
    return SlowRank(cycle=cycle, rank=rank, node="b", lag=0.2, waits=0.01, over_s=12.0, is_over=is_over)


def found(*records: tuple[float, Any]) -> list[Any]:
    timed = [Timed(at_ns=round(at_s * S), offset_ns=0, host="b", record=record) for at_s, record in records]
    run: Any = SimpleNamespace(records=timed)
    timeline = Timeline(run=run, begin_ns=10 * S, end_ns=0, names=(), tracks=(), marks=(), evidence=())
    return slow_ranks_of(timeline)


def test_slow_rank_lasts_until_it_is_over_or_its_cycle_has_ended() -> None:
    first, second, third = found(
        (20, slow()),
        (25, slow(7)),
        (30, slow()),  # by a launcher that has begun to speak for the job
        (50, slow(is_over=True)),
        (60, CycleEnded(cycle=0, outcome="failed")),
        (80, slow(3, cycle=1)),
    )
    assert [(each.rank, each.after_s, each.lasted_s) for each in (first, second, third)] == [
        (1, 10.0, 30.0),
        (7, 15.0, 35.0),
        (3, 70.0, None),
    ]
