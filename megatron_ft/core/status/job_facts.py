"""What a launcher knows of its job on this node, as it answers `megatron-ft status`. Pure.

Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ft.core.status.rows import RankRow

__all__ = ["JobFacts", "JobPhase", "LastCause"]


class JobPhase(enum.Enum):
    """What the job is about, as this node's launcher sees it."""

    STARTING = "starting"
    """No rank was made yet: the nodes meet, or modules are imported."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A cycle has ended, and the next one isn't there yet."""
    ENDING = "ending"
    """There will be no other cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCause:
    """Why the last cycle ended that didn't end well."""

    cycle: int
    text: str
    rank: int | None
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The job as this node's launcher sees it."""

    run_id: str
    launcher_pid: int
    log_dir: str
    """Empty: no logs are written."""
    started_ns: int
    phase: JobPhase
    cycle: int | None
    cycle_started_ns: int | None
    """Of the last cycle that was begun, as ``cycle``; None before the first."""
    nodes: int
    world_size: int
    max_restarts: int
    restarts_left: int
    observe_only: bool
    paused_since_ns: int | None
    last_cause: LastCause | None
    ranks: tuple[RankRow, ...]
    """Of this node."""
    now_ns: int
    """When it was so."""
