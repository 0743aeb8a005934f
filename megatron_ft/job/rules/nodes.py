"""The launchers of a job, as the leader knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.messages import Hello, NodePhase, NodeStatus
from megatron_ft.job.rules.restart_policy import Rules

GRACE_S = 0.3
"""A launcher whose connection has ended is dead, or back within this time."""
NEW_LEADER_S = 12.0
"""Shortest wait of a new leader for the launchers of a cycle that another one has begun."""
_NONE = Hello("", Rules(1, 1), "", "")


@dataclass(slots=True, eq=False)
class Node:
    """One launcher: connected, away for a while, or expected by a new leader since the cycle has a place for it.

    Times are those of the leader's own clock.
    """

    instance: str
    name: str
    hello: Hello = _NONE
    """The newest one, if it has come."""
    arrived: int = 0
    """Number of launchers that were known when this one came first; 0: it hasn't come to this leader."""
    link: int | None = None
    heard_s: float = 0.0
    gone_s: float = 0.0
    silent: bool = False
    """Its connection is gone, and its launcher may live: it hasn't closed the connection, or the leader was paused."""
    is_gone: bool = False
    """The launcher has left, or counts as lost."""
    phase: NodePhase = NodePhase.BUSY
    decided: Assignment | None = None
    """The last decision that the launcher has heard of."""
    standing: NodeStatus = NodeStatus()  # noqa: RUF009 - frozen
    place: int | None = None
    """In the last cycle."""
    progress_s: float | None = None
    """Time of the last progress of its ranks in the last cycle; None if none was seen."""
    progress_age_s: float | None = None
    """Seconds since then, as its launcher's last beat told them: what it hasn't told since may only be on its way."""

    def address_of(self, port: int) -> str:
        """Return the address of a port of this launcher's host; empty if it isn't known."""
        return f"{self.hello.host}:{port}" if self.hello.host else ""

    def begin(self, cycle: int) -> None:
        self.phase, self.standing, self.progress_s = NodePhase.RUNNING, NodeStatus(NodePhase.RUNNING, cycle), None
        self.progress_age_s = None

    @property
    def is_excluded(self) -> bool:
        return self.phase is NodePhase.EXCLUDED

    @property
    def is_ready(self) -> bool:
        return self.phase is NodePhase.READY and self.link is not None

    @property
    def is_awaited(self) -> bool:
        """True if no cycle begins before this node is ready, or known to be lost."""
        is_busy = self.phase in (NodePhase.BUSY, NodePhase.RUNNING)
        is_away = self.link is None and self.phase is NodePhase.READY
        return self.place is not None and not self.is_gone and (is_busy or is_away)
