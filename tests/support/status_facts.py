"""Boards and facts of a job for tests of `megatron-ft status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.launcher.rules.status_rows import RankReading, make_rows
from megatron_ft.link.base.layout import BoardSnapshot, SectionView
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.messages.job_facts import (
    JobFacts,
    JobPhase,
    LastCause,
    RankRow,
    RankState,
)

S = 1_000_000_000
START = 1000 * S
NOW = START + 100 * S


def snapshot(**changes: Any) -> BoardSnapshot:
    """A rank that has been out of section for 1 s, of 8 s that it may."""
    values: dict[str, Any] = {
        "start_ns": START,
        "iteration": 12,
        "iterations_seen": 12,
        "first_iteration": 0,
        "first_iteration_at_ns": START + S,
        "last_transition_ns": NOW - S,
        "last_look_ns": NOW,
        "timeouts_version": 1,
        "own_initial_heartbeat_timeout_ns": 3600 * S,
        "own_heartbeat_timeout_ns": 2700 * S,
        "own_out_of_section_timeout_ns": 8 * S,
        "rank": 5,
        "pid": 77,
        "sections": (SectionView("step", 0, 3, 10 * S), SectionView("save", 0, 1, 40 * S)),
    }
    return BoardSnapshot(**{**values, **changes})


def rank_facts(**changes: Any) -> RankRow:
    """Rank 5, which runs."""
    values: dict[str, Any] = {"rank": 5, "local_rank": 1, "pid": 77, "state": RankState.RUNNING}
    return RankRow(**{**values, **changes})


def job_facts(
    *ranks: RankRow,
    readings: Mapping[int, RankReading] | None = None,
    pauses: Sequence[tuple[int, int | None]] = (),
    now_ns: int = NOW,
    **changes: Any,
) -> JobFacts:
    """A job in its second cycle. ``readings`` by local rank; the last of the ``pauses`` may last."""
    paused = Pauses()
    for start_ns, end_ns in pauses:
        paused.begin(start_ns)
        if end_ns is not None:
            paused.end(end_ns)
    known = readings or {}
    rows = make_rows([(rank, known.get(rank.local_rank, RankReading())) for rank in ranks], paused, now_ns)
    values: dict[str, Any] = {
        "run_id": "demo",
        "launcher_pid": 70,
        "log_dir": "/logs",
        "started_ns": START - 5 * S,
        "phase": JobPhase.RUNNING,
        "cycle": 1,
        "cycle_started_ns": START,
        "nodes": 1,
        "world_size": 2,
        "max_restarts": 3,
        "restarts_left": 2,
        "observe_only": False,
        "paused_since_ns": paused.since_ns,
        "last_cause": LastCause(cycle=0, text="rank 1 hung", rank=1, kind="hang"),
        "slow_ranks": (),
        "ranks": rows,
        "now_ns": now_ns,
    }
    return JobFacts(**{**values, **changes})
