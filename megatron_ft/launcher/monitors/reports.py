"""A monitor's verdict as the launcher speaks of it."""

from __future__ import annotations

from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.records.shared import Verdict

__all__ = ["hang_verdict"]


def hang_verdict(verdict: Verdict, *, local_rank: int) -> HangVerdict:
    """As it is told to the coordinator, and to people."""
    return HangVerdict(
        rank=verdict.rank,
        local_rank=local_rank,
        kind=verdict.kind,
        section=verdict.section,
        elapsed_s=verdict.elapsed_s,
        timeout_s=verdict.timeout_s,
        iteration=verdict.iteration,
        at_ns=verdict.at_ns,
        stopped=verdict.state == "T",
        learned=verdict.learned,
    )
