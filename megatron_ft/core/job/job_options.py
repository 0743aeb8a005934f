"""The options of a job, as the coordinator needs them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.exit_codes import NO_PROGRESS_CODE, TRY_AGAIN_CODE
from megatron_ft.core.job.restart_policy import AnyFailed, MinHealthy, RestartPolicy

__all__ = ["Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the command lines of all launchers of a job say, the same for all. Times are seconds.

    Args:
        last_call_s: so long a round is open for more nodes after there are enough; None: 30 s for the first one, 1 s
            for a later one that has lost a node or gained one.
        join_timeout_s: so long a round waits for nodes that it needs.
        no_progress_code, try_again_code: exit codes of the launchers, where another cycle would fail where the last
            ones did, and where the job can't go on, but could be started again.
        segment: nodes train in groups of so many that share an NVLink domain; 0: in none.
        launchers: so many were started, and who has ended is never started again; 0: unknown.
    """

    min_nodes: int
    max_nodes: int
    min_healthy: bool = False
    max_restarts: int = 0
    max_stalled: int = 0
    max_failed_starts: int = 0
    at_once: bool = False
    last_call_s: float | None = None
    join_timeout_s: float = 600.0
    no_progress_code: int = NO_PROGRESS_CODE
    try_again_code: int = TRY_AGAIN_CODE
    launchers: int = 0
    segment: int = 0

    @property
    def policy(self) -> RestartPolicy:
        """When a cycle ends, and what follows."""
        kind = MinHealthy if self.min_healthy else AnyFailed
        return kind(
            max_restarts=self.max_restarts,
            min_nodes=self.min_nodes,
            max_stalled=self.max_stalled,
            max_failed_starts=self.max_failed_starts,
        )
