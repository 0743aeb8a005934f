"""`megatron-ft status --json`: one shot for scripts. The keys stand in docs/report.md; times are seconds."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.codec import fields
from megatron_ft.core.status.job_facts import JobFacts
from megatron_ft.core.status.rows import RankRow

__all__ = ["job_object"]


def job_object(facts: JobFacts) -> dict[str, Any]:
    """One job; null is "none" or "not known"."""
    cause, now_ns = facts.last_cause, facts.now_ns
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
        "last_cause": None if cause is None else fields(cause),
        "ranks": [_rank_object(row) for row in facts.ranks],
    }


def _rank_object(row: RankRow) -> dict[str, Any]:
    document = fields(row, full=True)
    if row.timeout is not None:
        document["timeout"]["share"] = row.timeout.share
    return document


def _since(then_ns: int | None, now_ns: int) -> float | None:
    return None if then_ns is None else max(0, now_ns - then_ns) / 1e9
