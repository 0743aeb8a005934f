"""`megatron-ft status --json`: one shot for scripts. The keys stand in docs/specification.md; times are seconds."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.status.job_facts import JobFacts
from megatron_ft.core.status.rows import RankRow, TimeoutUse

__all__ = ["job_object"]


def job_object(facts: JobFacts, rows: list[RankRow], now_ns: int) -> dict[str, Any]:
    """One job; null is "none" or "not known"."""
    cause = facts.last_cause
    return {
        "run_id": facts.run_id,
        "launcher_pid": facts.launcher_pid,
        "log_dir": facts.log_dir,
        "phase": facts.phase.value,
        "uptime_s": _since(facts.started_ns, now_ns),
        "cycle": facts.cycle,
        "cycle_s": _since(facts.cycle_started_ns, now_ns),
        "nodes": facts.nodes,
        "world_size": facts.world_size,
        "max_restarts": facts.max_restarts,
        "restarts_left": facts.restarts_left,
        "observe_only": facts.observe_only,
        "paused_s": _since(facts.paused_since_ns, now_ns),
        "last_cause": None
        if cause is None
        else {"cycle": cause.cycle, "kind": cause.kind, "rank": cause.rank, "text": cause.text},
        "ranks": [_rank_object(row) for row in rows],
    }


def _rank_object(row: RankRow) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "local_rank": row.local_rank,
        "pid": row.pid,
        "state": row.state.value,
        "exit_code": row.exit_code,
        "iteration": row.iteration,
        "sections": [section._asdict() for section in row.sections],
        "out_of_section_s": row.out_of_section_s,
        "heartbeat_s": row.heartbeat_s,
        "timeout": None if row.timeout is None else _timeout_object(row.timeout),
    }


def _timeout_object(use: TimeoutUse) -> dict[str, Any]:
    return {**use._asdict(), "share": use.share}


def _since(then_ns: int | None, now_ns: int) -> float | None:
    return None if then_ns is None else max(0, now_ns - then_ns) / 1e9
