"""Events that the launcher's machine takes, and effects that it asks for.

Effects of the launcher's member of the control plane (`OfMember` of `job.rules.actions`), and messages of the
coordinator that it passes on (`End`, `Verdict`, messages of parts), are events here; so is a rank's `WorkloadControl`.
Times that end in ``_ns`` are nanoseconds of CLOCK_MONOTONIC, others seconds.
"""

from __future__ import annotations

import enum
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.job.rules.actions import OfMember
from megatron_ft.job.rules.decisions import Decision
from megatron_ft.job.rules.messages import NodeMessage, Tell, Verdict
from megatron_ft.link.base.codec import Fact
from megatron_ft.link.base.control import WorkloadControl
from megatron_ft.link.base.launcher_part import PartEffect, PartEvent
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.link.base.process_facts import ProcessFacts
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import Abandoned, Cause, NodeHealth, RankExited, RankStarted
from megatron_ft.link.messages.monitor_messages import RankOrder, RankReport, Release


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of this node's ranks at an event, by local rank.

    Args:
        boards: boards of this cycle; None for a rank without one.
        words: what each rank wrote about its end.
        stopped: True if the process is stopped by a signal.
        run_delays_ns: total CPU wait of each thread.
        checkpointed: returns the iteration of the last checkpoint, None if no file holds it.
        is_finished: returns True if the flag is there that the training is finished.
        collectives: counts; None for a rank without a process group.
    """

    boards: Mapping[int, BoardSnapshot | None]
    words: Mapping[int, CrashOutput]
    stopped: Mapping[int, bool]
    run_delays_ns: Mapping[int, Mapping[int, int]]
    checkpointed: Callable[[], int | None] = lambda: None
    is_finished: Callable[[], bool] = lambda: False
    collectives: Mapping[int, CollectiveCounts | None] = field(default_factory=lambda: defaultdict(lambda: None))


class Tick(NamedTuple):
    """``Agent.alarm_ns`` is over. Also the first event, once the launcher is up."""


class StopAsked(NamedTuple):
    """A signal asks the launcher to stop. ``again``: the second request; no process is waited for any more."""

    number: signal.Signals
    again: bool = False


class Continued(NamedTuple):
    """The launcher was stopped and continued, and so were its ranks, if the whole node was."""


class RanksMet(NamedTuple):
    """The nodes have met. ``ranks``: the global ranks of this node, by local rank."""

    ranks: Sequence[int]
    group_rank: int
    nodes: int
    world_size: int


class RanksStarted(NamedTuple):
    """All ranks were created."""


class NotStarted(NamedTuple):
    """Ranks were not started. ``cause`` is None if the cycle is over, or the launcher was asked to stop."""

    cause: Cause | None = None


class RanksEnded(NamedTuple):
    """Answer to ``TerminateRanks``. ``stuck``: processes that survived SIGKILL, in words and as facts."""

    stuck: str = ""
    processes: Sequence[ProcessFacts] = ()


class MonitorReport(NamedTuple):
    """A monitor reports something of its rank. `Detached` comes again from a monitor that replaces another one."""

    local_rank: int
    report: RankReport


OfRanks = RanksMet | RankStarted | RanksStarted | NotStarted | RankExited | RanksEnded | MonitorReport
Event = Tick | StopAsked | Abandoned | Continued | NodeHealth | WorkloadControl | OfRanks | OfMember | PartEvent | Fact


# -- effects that take their time: one at a time, and an event says when it is done -----------------------------


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the user's health command, maybe beside ranks; answered by ``NodeHealth``. Given up if the phase changes."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Let the nodes meet and start the ranks of this cycle; answered by ``RanksMet``, ``RankStarted`` and
    ``RanksStarted``, or by ``NotStarted``. Given up when ``Agent.wants_ranks`` doesn't hold any more."""

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
class Write:
    """Write a record to the event log; ``at_ns``: its time, if that isn't now."""

    record: Record
    at_ns: int | None = None


OnRanks = SignalRanks | OrderMonitor | Release | KeepEvidence
Effect = Work | OnRanks | LauncherExit | NodeMessage | PartEffect | Tell | Write
