"""The events that the launcher's machine takes, and the effects that it asks for.

What the launcher's member of the control plane asks for (``Begin``, ``EndRanks``, ``Conclude``, ``DiagnoseHang`` and
``Leave`` of `core.job.edge`) are events here, and so is a rank's ``ReceivedRequest``. Times are nanoseconds of
CLOCK_MONOTONIC unless a name says otherwise.
"""

from __future__ import annotations

import enum
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.agent.monitor_events import Attached as Attached
from megatron_ft.core.agent.monitor_events import Detached as Detached
from megatron_ft.core.agent.monitor_events import EvidenceCollected as EvidenceCollected
from megatron_ft.core.agent.monitor_events import FoundHung as FoundHung
from megatron_ft.core.agent.monitor_events import FromMonitor as FromMonitor
from megatron_ft.core.agent.monitor_events import IntervalsReported as IntervalsReported
from megatron_ft.core.agent.monitor_events import MilestoneReached as MilestoneReached
from megatron_ft.core.agent.monitor_events import ProgressChecked as ProgressChecked
from megatron_ft.core.agent.monitor_events import Signalled as Signalled
from megatron_ft.core.agent.monitor_events import Suspected as Suspected
from megatron_ft.core.agent.monitor_events import Trains as Trains
from megatron_ft.core.board.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.core.control import ReceivedRequest
from megatron_ft.core.diagnosis.cycle_cause import Cause
from megatron_ft.core.diagnosis.exceptions import CrashOutput
from megatron_ft.core.diagnosis.exits import RankExit
from megatron_ft.core.job import edge as job
from megatron_ft.core.job.messages import Said, Speak, Verdict
from megatron_ft.core.process_facts import ProcessFacts
from megatron_ft.core.records.all_kinds import Record
from megatron_ft.core.timeouts.exchange import Arm, Moment, Survey
from megatron_ft.core.timeouts.learned import LearnedState


@dataclass(frozen=True, slots=True)
class Readings:
    """What the launcher reads of this node's ranks at an event, by local rank.

    Args:
        boards: of this cycle; None where there is none.
        words: what each wrote of its end.
        stopped: whether the process is stopped by a signal.
        run_delays_ns: by thread, how long it has waited for a CPU in its life.
    """

    boards: Mapping[int, BoardSnapshot | None]
    words: Mapping[int, CrashOutput]
    stopped: Mapping[int, bool]
    run_delays_ns: Mapping[int, Mapping[int, int]]
    checkpointed: Callable[[], int | None] = lambda: None
    """The iteration of the last checkpoint, where a file holds it."""
    collectives: Mapping[int, CollectiveCounts | None] = field(default_factory=lambda: defaultdict(lambda: None))
    """Counts by rank; None for one without a process group."""


# -- events: the launcher -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``Agent.alarm_ns`` is over. The first event, too: the launcher is up."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A signal asks the launcher to stop. ``again``: for the second time; no process is to be waited for any more."""

    number: signal.Signals
    again: bool = False


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The process that started the launcher has ended, or its output has no reader. ``text``: which, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class Continued:
    """The launcher was stopped and continued, and so were its ranks, if the whole node was."""


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """How ``CheckHealth`` came out. ``ended`` is empty if the node is fit, else as in "exited with code 3"."""

    cycle: int
    """The one that would begin then."""
    ended: str
    code: int | None
    last_line: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StateRead:
    """Answer to ``ReadState``. ``state``: None if there is no file, or none that can be used.

    ``problem``: what is wrong with the file, a line; ``may_write``: this run may write it.
    """

    path: str
    state: LearnedState | None
    problem: str = ""
    may_write: bool = True


@dataclass(frozen=True, slots=True)
class StateWritten:
    """Answer to ``WriteState``. ``problem``: why the file could not be written, a line."""

    ok: bool
    problem: str = ""
    moment: Moment | None = None


# -- events: ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RanksMet:
    """The nodes have met. ``ranks``: the global ranks of this node, by local rank."""

    ranks: Sequence[int]
    group_rank: int
    nodes: int
    world_size: int


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank's process was made."""

    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """All of them were."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """They weren't: because of this, or (None) because the cycle is over, or the launcher was asked to stop."""

    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process has ended. ``exitcode`` as ``subprocess`` has it; the signals are the launcher's."""

    local_rank: int
    exitcode: int
    at_ns: int
    signals_sent: frozenset[int] = frozenset()
    signalled_at_ns: int = 0


@dataclass(frozen=True, slots=True)
class RanksEnded:
    """What ``TerminateRanks`` asked for is done. ``stuck``: processes that outlive SIGKILL, as text and record."""

    stuck: str = ""
    processes: Sequence[ProcessFacts] = ()


FromLauncher = Tick | StopAsked | Abandoned | Continued | HealthChecked | StateRead | StateWritten
FromRanks = RanksMet | RankStarted | RanksStarted | NotStarted | RankExited | RanksEnded | ReceivedRequest
FromCoordinator = (
    job.Begin
    | job.StandBy
    | job.EndRanks
    | job.Conclude
    | job.DiagnoseHang
    | job.Relayed
    | job.Reviewed
    | job.OfLearning
)
Event = FromLauncher | FromRanks | FromMonitor | FromCoordinator | Speak | job.LeftOut | job.Leave

# -- effects that take their time: one at a time, and an event says when it is done -----------------------------


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Run the user's command that says whether the node is fit; answered by ``HealthChecked``. Given up when
    the phase is another one.
    """


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Let the nodes meet and start the ranks; answered by ``RanksMet``, ``RankStarted`` and ``RanksStarted``, or by
    ``NotStarted``. Given up when ``Agent.wants_ranks`` doesn't hold any more.
    """

    restarts_left: int


class Way(enum.Enum):
    """How ranks are ended."""

    TERMINATED = "terminated"
    """SIGTERM, and SIGKILL for what is left after the grace."""
    FINISHED = "finished"
    """They have; what they left behind has a moment to end, and is reported."""
    KILLED = "killed"
    """They were asked to stop, and their time is over."""


@dataclass(frozen=True, slots=True)
class TerminateRanks:
    """End all that is left of the ranks; answered by ``RanksEnded``.

    ``leftover_grace_s``: what a rank that was asked to stop has left may take so long; None: it isn't waited for.
    """

    way: Way
    grace_s: float
    leftover_grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class MetAgain:
    """Another cycle is to follow: see to what the ended ranks have held."""


class Exit(enum.Enum):
    """How this launcher's part of the job ends."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The job has, for good, or a rank has asked for its end."""
    STOPPED = "stopped"
    """By a signal to the launcher."""
    ABANDONED = "abandoned"
    """The process that started it has ended, or its output has no reader."""
    EXCLUDED = "excluded"
    """This node has left the others: a rank asked for that, or can't be killed."""
    STAYED = "stayed"
    """The same, and the launcher has stayed until the job's end."""
    LEFT = "left"
    """The job has ended, or goes on, without this node."""


@dataclass(frozen=True, slots=True)
class Over:
    """This launcher's part in the job is over.

    Args:
        code: its exit code.
        text: why, in words, as far as is known.
        verdict: on the last cycle; None if none has come.
        cause: why the job has failed because of ranks of this node, which torch's table of failures names.
    """

    how: Exit
    code: int
    text: str = ""
    verdict: Verdict | None = None
    cause: Cause | None = None


# -- effects that are done at once ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Signal those of them that live; one that is stopped is continued."""

    local_ranks: Sequence[int]
    number: int
    whole_group: bool = False


@dataclass(frozen=True, slots=True)
class CollectEvidence:
    """Have its monitor collect evidence on a rank. ``passive``: without a signal to it, because it may run on."""

    local_rank: int
    passive: bool
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Have its monitor observe a rank now and at ``again_ns``, without a signal to it: does it make progress?"""

    local_rank: int
    again_ns: int


@dataclass(frozen=True, slots=True)
class ExtendTimeout:
    """The interval for which this rank is suspected may last ``timeout_s`` in all."""

    local_rank: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ConfirmHang:
    """Report this rank as hung, if the interval for which it is suspected still lasts."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """Everything has been seen: the monitors may end ranks that were found hung."""


@dataclass(frozen=True, slots=True)
class ArmMonitor:
    """Have the monitor of a rank apply these learned timeouts."""

    local_rank: int
    arm: Arm


@dataclass(frozen=True, slots=True)
class SurveyRank:
    """Have the monitor of a rank report its intervals; answered by ``IntervalsReported``."""

    local_rank: int
    survey: Survey


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the file of learned timeouts; answered by ``StateRead``. ``sets_aside``: if it is broken."""

    path: str
    sets_aside: bool = False


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write the file of learned timeouts; answered by ``StateWritten``. ``moment``: None after a kill."""

    path: str
    state: LearnedState
    moment: Moment | None = None


@dataclass(frozen=True, slots=True)
class TellStateWritten:
    """Tell the ranks of this node what became of the last timeouts: a STATE_ value of `core.board.layout`."""

    value: int


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Write what is known of a rank that has ended by itself, badly."""

    cycle: int
    ended: RankExit


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the coordinator. ``within_s``: with a `Goodbye`, when ``Leave`` is to come at the latest."""

    message: Said
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TellStop:
    """Say once that the launcher was asked to stop, and to how many ranks the signal goes."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Write:
    """A record of the event log; ``at_ns``: when it happened, if that isn't now."""

    record: Record
    at_ns: int | None = None


Work = CheckHealth | StartRanks | TerminateRanks
Effect = (
    Work
    | MetAgain
    | Over
    | SignalRanks
    | CollectEvidence
    | CheckProgress
    | ExtendTimeout
    | ConfirmHang
    | Release
    | ArmMonitor
    | SurveyRank
    | ReadState
    | WriteState
    | TellStateWritten
    | KeepEvidence
    | Tell
    | TellStop
    | Say
    | Write
)
