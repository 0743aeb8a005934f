"""Where the launcher's machine is in the life of a cycle."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ft.core.diagnosis.exits import Cause
from megatron_ft.core.job.restart_policy import Outcome, RestartDecision

__all__ = ["AgentPhase", "Ended"]


class AgentPhase(enum.Enum):
    """What the launcher is about."""

    JOINING = "joining"
    CHECKING = "checking"
    """Its health command runs."""
    ASIDE = "aside"
    READY = "ready"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    """Ranks are given time to end by themselves."""
    TERMINATING = "terminating"
    JUDGING = "judging"
    """Why the cycle has ended isn't known yet."""
    AGREEING = "agreeing"
    """The ranks have finished; torch's rendezvous has the others wait, too."""
    DONE = "done"
    """None of its ranks is left, and not all nodes know yet how the job has ended."""
    LEAVING = "leaving"
    """The others have received that this node leaves."""
    EXCLUDED = "excluded"
    """They go on without it, and the launcher waits for the end of the job."""
    OVER = "over"


@dataclass(frozen=True)
class Ended:
    """How a cycle has ended on this node; well if there is no cause."""

    cycle: int
    outcome: Outcome
    decision: RestartDecision
    cause: Cause | None
