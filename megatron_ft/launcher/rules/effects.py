"""Effects of the launcher's machine: what it asks for. Times are seconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.decisions import Decision
from megatron_ft.job.rules.messages import NodeMessage, Verdict
from megatron_ft.link.base.launcher_part import PartEffect
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import Cause, RankExited
from megatron_ft.link.messages.monitor_messages import RankOrder, Release

# -- effects that take their time: one at a time, and an event says when it is done -----------------------------


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the user's health command, maybe beside ranks; answered by ``NodeHealth``. Given up if the phase changes."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Let the nodes meet and start the ranks; answered by ``RanksMet``, ``RankStarted`` and ``RanksStarted``, or by
    ``NotStarted``. Given up when ``Agent.wants_ranks`` doesn't hold any more."""

    restarts_left: int
    decision: Decision


class TerminationMode(enum.Enum):
    """Way of ending ranks."""

    TERMINATED = "terminated"
    """SIGTERM, then SIGKILL for what is left after the grace."""
    FINISHED = "finished"
    """Ranks have finished; leftover processes have a moment to end, and are reported."""
    KILLED = "killed"
    """Ranks were asked to stop, and their time is over."""


@dataclass(frozen=True, slots=True)
class TerminateRanks:
    """End everything left of the ranks; answered by ``RanksEnded``.

    ``leftover_grace_s``: time for leftover processes of ranks that were asked to stop; None: no wait.
    """

    way: TerminationMode
    grace_s: float
    leftover_grace_s: float | None = None


Work = CheckHealth | StartRanks | TerminateRanks


# -- effects that are done at once ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CycleRetrying:
    """Another cycle follows: wait for what the ended ranks have held."""


class Exit(enum.Enum):
    """Kind of end of this launcher's part in the job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The job has failed for good, or a rank has asked for its end."""
    STOPPED = "stopped"
    """A signal to the launcher."""
    ABANDONED = "abandoned"
    """The process that started the launcher has ended, or its output has no reader."""
    EXCLUDED = "excluded"
    """This node has left the others: a rank asked for that, or can't be killed."""
    STAYED = "stayed"
    """Like EXCLUDED, and the launcher has stayed until the job's end."""
    LEFT = "left"
    """The job has ended, or goes on, without this node."""


@dataclass(frozen=True, slots=True)
class LauncherExit:
    """End of this launcher's part in the job.

    Args:
        code: its exit code.
        text: reason in words, as far as known.
        verdict: verdict on the last cycle; None if none has come.
        cause: set if ranks of this node made the job fail; named in torch's table of failures.
    """

    how: Exit
    code: int
    text: str = ""
    verdict: Verdict | None = None
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Signal the live ranks among these; a stopped one is continued."""

    local_ranks: Sequence[int]
    number: int
    whole_group: bool = False


@dataclass(frozen=True, slots=True)
class OrderMonitor:
    """Send an order to the monitor of a rank."""

    local_rank: int
    order: RankOrder


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Write the evidence on a rank that has failed by itself."""

    ended: RankExited


@dataclass(frozen=True, slots=True)
class TellStop:
    """Print, once, that the launcher was asked to stop, and how many ranks get the signal."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write a record to the event log; ``at_ns``: its time, if that isn't now."""

    record: Record
    at_ns: int | None = None


ToRanks = SignalRanks | OrderMonitor | Release | KeepEvidence
Effect = Work | ToRanks | CycleRetrying | LauncherExit | NodeMessage | PartEffect | TellStop | Say | Write
