"""What follows from the cycles so far: go on, restart, give up, finish. Pure: no clock, no process."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Action", "AnyFailed", "CycleEnd", "Decision", "GroupView", "Outcome", "RestartPolicy"]


class Outcome(enum.Enum):
    """How a cycle ended on this node; the values stand in the event log."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """Somebody asked for the end: a signal to the launcher, or a rank's request to shut the workload down."""
    MEMBERSHIP = "membership"
    """Nothing failed here: another node left its ranks, or one wants to join."""


class Action(enum.Enum):
    """What the launcher does next; the values stand in the event log."""

    RESTART = "restart"
    FINISH = "finish"
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True)
class CycleEnd:
    """One cycle that is over."""

    cycle: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and how many restarts are left after it."""

    action: Action
    restarts_left: int
    reason: str
    """Why, for the end of the launcher's line; empty where the cause of the cycle's end says it all."""


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """A running cycle as its launcher sees it: counts of this node's ranks, and of nodes that wait to join."""

    running: int
    succeeded: int
    failed: int
    nodes_waiting: int = 0


class RestartPolicy(Protocol):
    """When a cycle is over, and what follows from it."""

    def judge(self, view: GroupView) -> Outcome | None:
        """How the running cycle has ended; None if it goes on. Asked after each thing that happens to it."""
        ...

    def decide(self, history: Sequence[CycleEnd]) -> Decision:
        """What follows from all cycles of this launcher, the last one just ended."""
        ...


@dataclass(frozen=True)
class AnyFailed:
    """All ranks restart when any rank fails, at most ``max_restarts`` times. Membership changes cost nothing."""

    max_restarts: int

    def judge(self, view: GroupView) -> Outcome | None:
        """See the protocol."""
        if view.failed:
            return Outcome.FAILED
        if not view.running:
            return Outcome.SUCCEEDED
        return Outcome.MEMBERSHIP if view.nodes_waiting else None

    def decide(self, history: Sequence[CycleEnd]) -> Decision:
        """See the protocol."""
        assert history, "a decision needs a cycle that has ended"
        used = sum(end.outcome is Outcome.FAILED for end in history)
        left = max(0, self.max_restarts - used)
        match history[-1].outcome:
            case Outcome.SUCCEEDED:
                return Decision(action=Action.FINISH, restarts_left=left, reason="")
            case Outcome.STOPPED:
                return Decision(action=Action.GIVE_UP, restarts_left=left, reason="not restarting")
            case Outcome.MEMBERSHIP:
                return Decision(action=Action.RESTART, restarts_left=left, reason="")
            case Outcome.FAILED if used <= self.max_restarts:
                return Decision(action=Action.RESTART, restarts_left=left, reason="")
            case Outcome.FAILED:
                reason = "no restarts left, giving up" if self.max_restarts else "no restarts allowed, giving up"
                return Decision(action=Action.GIVE_UP, restarts_left=0, reason=reason)
