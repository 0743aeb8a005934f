"""Records of a launcher about the job, its cycles and its ranks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from megatron_ft.link.base.codec import (
    Count,
    Cycle,
    Fact,
    Finite,
    Int,
    LocalRank,
    Moment,
    Pid,
    Rank,
    Seconds,
    WorldSize,
)
from megatron_ft.link.base.control import WorkloadControl
from megatron_ft.link.base.process_facts import Holding, ProcessFacts
from megatron_ft.link.base.rerun import Rerun, RerunState, rerun_meaning
from megatron_ft.link.base.wording import when
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.memory.rules.snapshots import SnapshotKey

# -- the job ----------------------------------------------------------------------------------------------------


class Config(Fact, frozen=True, kw_only=True):
    """The options of the launcher.

    Args:
        values: value of each option.
        sources: where each comes from: "default", "command line", or the place in a file.
    """

    values: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    command: tuple[str, ...] = ()


class Meeting(Fact, frozen=True, kw_only=True):
    """How the launchers of the job meet.

    Args:
        how: "coordinated", "alone".
        rank: of this launcher, if it was given one.
    """

    how: str = ""
    rank: Count | None = None


class NodeHealth(Fact, frozen=True, kw_only=True):
    """The health check command has run on this node.

    Args:
        cycle: cycle about to begin; the current one if its ranks run.
        good: true if the node is fit.
        exit_code: null if the command had to be killed.
        text: how it ended; empty if it succeeded.
        last_line: last line of its output.
    """

    cycle: Cycle
    good: bool
    exit_code: Int | None = None
    text: str = ""
    last_line: str = ""
    seconds: Seconds | None = None


class StopRequested(Fact, frozen=True, kw_only=True):
    """The launcher was asked to stop.

    Args:
        ranks: number of ranks that got the signal, too.
    """

    signal: str = ""
    ranks: Count = 0


class Abandoned(Fact, frozen=True, kw_only=True):
    """The launcher ends its ranks and leaves the job, of its own accord.

    Args:
        text: what is gone: the process that started the launcher, or the reader of its output.
    """

    text: str = ""


class SignalForwarded(Fact, frozen=True, kw_only=True):
    """A signal was forwarded to the ranks (--ft-forward-signals).

    Args:
        local_ranks: ranks that got it.
        unready: local ranks without a handler for it, which it would only have ended.
    """

    signal: str = ""
    local_ranks: tuple[LocalRank, ...] = ()
    unready: tuple[LocalRank, ...] = ()


class Paused(Fact, frozen=True, kw_only=True):
    """Hang detection on this node is paused."""


class Resumed(Fact, frozen=True, kw_only=True):
    """Hang detection on this node is on again."""


class LauncherFailed(Fact, frozen=True, kw_only=True):
    """The launcher itself has failed, by an unforeseen error: its node is lost to the others.

    Args:
        text: the printed line.
    """

    text: str = ""
    traceback: str = ""


class RunEnded(Fact, frozen=True, kw_only=True):
    """The last record of a launcher that has ended by itself."""

    exit_code: Int | None = None


# -- its cycles -------------------------------------------------------------------------------------------------


class CauseKind(enum.Enum):
    """Kind of cause that ended a cycle; the values appear in the event log."""

    HANG = "hang"
    CRASH = "crash"
    SIGNAL = "signal"
    REQUEST = "request"
    MEMBERSHIP = "membership"


class FailureClass(enum.Enum):
    """Part of the system in which a failure began; the values appear in the event log and in `result.json`."""

    WORKLOAD = "workload"
    HARDWARE = "hardware"
    NETWORK = "network"
    STORAGE = "storage"
    CASCADE = "cascade"
    """It follows from another rank's failure."""


class Attribution(Fact, frozen=True, kw_only=True):
    """Class of a failure, as the text of its first error says.

    Args:
        kind: "workload", "hardware", "network", "storage", "cascade".
        sign: what the text shows, "disk full", "Xid 79"; empty where the line says it already.
    """

    kind: FailureClass
    sign: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.sign}" if self.sign else self.kind.value


class Cause(Fact, frozen=True, kw_only=True):
    """Why a cycle ended.

    Args:
        rank: rank at fault; null if none is, or if unknown.
        kind: "hang", "crash", "signal", "request", "membership".
        text: the printed line.
        detail: details of the evidence; empty if there are none.
        host: node at fault; empty if unknown.
        hosts: nodes between which connections were lost; no fault of theirs is known.
        iteration: iteration completed by that rank.
        section: overdue section of a hang, or the ``kind`` of its ``verdict``; empty for other causes.
        follows: the exit only follows from another rank's, on another node.
        by_us: the launcher or a monitor ended the rank, and no other exit tells more.
        rerun: why Megatron's rerun state machine ended the ranks: "elsewhere", "again" (another GPU), "transient",
            "concluded".
        attribution: class of the failure; null if its first error doesn't tell.
    """

    rank: Rank | None = None
    kind: CauseKind = CauseKind.MEMBERSHIP
    text: str = ""
    detail: str = ""
    host: str = ""
    hosts: tuple[str, ...] = ()
    iteration: Int | None = None
    section: str = ""
    follows: bool = False
    by_us: bool = False
    rerun: Rerun | None = None
    attribution: Attribution | None = None

    @property
    def line(self) -> str:
        """Text, iteration if known, detail, and the class of the failure where that says more."""
        line = self.text if self.iteration is None else f"{self.text} {when(self.iteration)}"
        line = f"{line}, {self.detail}" if self.detail else line
        return f"{line} ({self.attribution})" if self.attribution and self.attribution.sign else line


class CycleStarted(Fact, frozen=True, kw_only=True):
    """The ranks of this node were created.

    Args:
        group_rank: GROUP_RANK of this node.
        world_size: number of ranks on all nodes.
        restarts_left: remaining ones of ``max_restarts``.
        back: names of nodes here that were lost before, or that earlier lives call bad.
        begun_ns: when enough nodes were there, and the coordinator began the cycle.
        met_ns: when all nodes had met.
        spawned_ns: when the last of these ranks was created.
    """

    cycle: Cycle
    ranks: tuple[RankStarted, ...] = ()
    group_rank: Count | None = None
    world_size: WorldSize | None = None
    max_restarts: Count | None = None
    restarts_left: Count | None = None
    back: tuple[str, ...] = ()
    begun_ns: Moment | None = None
    met_ns: Moment | None = None
    spawned_ns: Moment | None = None


class CycleEnded(Fact, frozen=True, kw_only=True):
    """A cycle is over on this node: its ranks have ended.

    Args:
        outcome: "succeeded", "failed" or "stopped".
        cause: null if nothing failed; of several nodes, prefer one that says more than "membership".
        action: what follows: "restart", "finish", ...
        iteration: iteration completed at the end, by the rank at fault if there is one.
        noticed_ns: when the first failure on this node was known; null if there was none.
        ending_ns: when this node began to end its ranks.
    """

    cycle: Cycle
    outcome: str = "unknown"
    cause: Cause | None = None
    action: str = ""
    iteration: Int | None = None
    restarts_left: Int | None = None
    noticed_ns: Moment | None = None
    ending_ns: Moment | None = None

    @property
    def restarts(self) -> bool:
        """True if another cycle follows."""
        return self.action == "restart"


class NodeLost(Fact, frozen=True, kw_only=True):
    """A node has left a cycle unasked, or isn't heard of any more. One launcher of the job writes it.

    Args:
        text: why, as far as known.
    """

    cycle: Cycle
    node: str
    text: str = ""


PHASES = (
    *("stop", "rendezvous", "ranks created", "user code", "imports", "imports and process group"),
    *("set up", "first step"),
)
"""All that a `TrainingAgain` may name."""


class TrainingAgain(Fact, frozen=True, kw_only=True):
    """All ranks of this node are through their first step after a restart.

    Args:
        seconds: duration of each phase since the fault was detected.
        redone: iterations that were done before the fault and are done again; null if unknown.
    """

    cycle: Cycle
    seconds: Mapping[str, Finite] = {}
    redone: Count | None = None


class SnapshotRestored(Fact, frozen=True, kw_only=True):
    """The ranks of this node have restored their state from memory, and compared it with its digests.

    Args:
        key: the snapshot, by the cycle in which it was written, its era and its iteration.
        seconds: taken by the slowest of them.
        redone: iterations from the snapshot to the end of the cycle before; null if unknown.
        newer_than: iteration of the checkpoint that the script has on disk; null if it named none.
    """

    cycle: Cycle
    key: SnapshotKey
    ranks: tuple[Rank, ...] = ()
    seconds: Seconds | None = None
    redone: Count | None = None
    newer_than: Int | None = None


class RestoreFailed(Fact, frozen=True, kw_only=True):
    """A rank could not restore the snapshot that the job goes on from: the cycle ends."""

    rank: Rank
    cycle: Cycle
    key: SnapshotKey
    text: str = ""


class Stuck(Fact, frozen=True, kw_only=True):
    """Processes of ranks can't be killed."""

    cycle: Cycle
    processes: tuple[ProcessFacts, ...] = ()


class DeviceMemory(Fact, frozen=True, kw_only=True):
    """Memory of ended ranks was waited for.

    Args:
        held: memory that was still held when the wait ended.
    """

    waited_s: Seconds
    held: tuple[Holding, ...] = ()


# -- their processes --------------------------------------------------------------------------------------------


class RankStarted(Fact, frozen=True, kw_only=True):
    """A rank's process."""

    rank: Rank
    local_rank: LocalRank = 0
    pid: Pid | None = None
    at_ns: Moment = 0


class RankExited(Fact, frozen=True, kw_only=True):
    """A rank's process has ended, at ``t``.

    Args:
        exitcode: negative for the signal that ended it.
        by_us: the launcher or the monitor has ended it.
        iteration: iteration completed by then.
        error: its exception, if known.
        at_ns: when the launcher saw it.
        signals_sent: numbers of the signals that the launcher or the rank's monitor had sent before.
        signalled_at_ns: when the launcher sent the first of them, 0 if it sent none.
        raised_at_ns: time by which its exception was raised; 0 if unknown.
        where: place in the user's code, "loader.py:88 next_batch"; empty if unknown.
        rerun_state: of Megatron's rerun state machine at its end; null if the rank has written none.
        kernel: lines of the kernel's log on GPUs and memory, since the rank's start.
        unread: its error file could not be read in time, so whether it raised is unknown.
        after_run: it crashed after the end of its run: its work was done.
    """

    rank: Rank
    cycle: Cycle
    local_rank: LocalRank = 0
    pid: Pid | None = None
    exitcode: Int
    by_us: bool = False
    iteration: Int | None = None
    error: str | None = None
    at_ns: Moment = 0
    signals_sent: tuple[Int, ...] = ()
    signalled_at_ns: Moment = 0
    raised_at_ns: Moment = 0
    where: str = ""
    rerun_state: RerunState | None = None
    kernel: tuple[str, ...] = ()
    unread: bool = False
    after_run: bool = False

    @property
    def rerun(self) -> Rerun | None:
        """Reason for which Megatron's rerun state machine ended the rank; None if something else did."""
        return rerun_meaning(self.exitcode, self.rerun_state)


class HangReported(Fact, frozen=True, kw_only=True):
    """An interval was longer than its timeout, and the ranks of all nodes were examined. One launcher writes it.

    Args:
        rank: rank that keeps the others waiting; null if unknown, or no rank waits.
        section: overdue section, or the ``kind`` of its ``verdict``: "collectives" if none has completed on any rank.
        iteration: iteration completed by the rank that was found first.
        elapsed_s: duration when the ranks were examined.
        text: the rank, its place, and what the others do, in words.
        ends: the cycle is ended for it (--ft-watch-collectives end); else no rank is ended.
    """

    cycle: Cycle
    rank: Rank | None = None
    section: str
    iteration: Int | None = None
    elapsed_s: Seconds
    text: str = ""
    ends: bool = False


class MonitorReplaced(Fact, frozen=True, kw_only=True):
    """A monitor has died, or stopped working; another one takes over its rank.

    Args:
        pid: process of the old monitor.
    """

    local_rank: LocalRank
    rank: Rank | None = None
    reason: str = ""
    pid: Pid | None = None


# -- how they are made: forked from a process with their imports, or fresh interpreters -------------------------


class ForkServer(Fact, frozen=True, kw_only=True):
    """The process that imports what ranks share, and forks them.

    Args:
        state: "started", "ready", "acts", "ended", "not started", "fork failed": this time ranks are fresh
            interpreters, or "given up": they are from now on.
        where: line up to which imports are shared, or of the import that acts.
        what: module that acts, and its act.
        took_s: time for the imports.
        reason: import that acts, or why the server was ended, can't fork, or was given up.
    """

    state: str = ""
    pid: Pid | None = None
    where: str = ""
    what: str = ""
    took_s: Seconds | None = None
    exit_code: Int | None = None
    reason: str | None = None


# -- those that hang, or may: what their monitors can't know alone ----------------------------------------------


class Finding(Fact, frozen=True, kw_only=True):
    """The result of a hang diagnosis: which rank hung. One launcher of the job writes it."""

    cycle: Cycle
    rank: Rank | None = None
    text: str = ""


class MoreTime(Fact, frozen=True, kw_only=True):
    """A learned timeout was over, but a rank made progress: this one isn't terminated yet.

    Args:
        verdict: what was overdue, as in a ``verdict``; ``timeout_s`` is the learned timeout.
        until_s: extended limit, from the start of the interval.
        progress: which rank made progress, and how, in words.
    """

    verdict: RankHung
    until_s: Seconds | None = None
    progress: str = ""


class SlowRank(Fact, frozen=True, kw_only=True):
    """A rank holds the others back, which wait for it in collectives. The launcher that speaks for the job writes it.

    Args:
        lag: share of their time that the others, by their median, wait for it.
        waits: share of its time that the rank itself spends in collectives.
        over_s: length of the last measurement.
        is_over: it does so no more; ``lag`` and ``waits`` are as before.
    """

    cycle: Cycle
    rank: Rank
    node: str
    lag: Finite
    waits: Finite
    over_s: Seconds
    is_over: bool = False


Record = (
    Config
    | Meeting
    | NodeHealth
    | StopRequested
    | Abandoned
    | SignalForwarded
    | Paused
    | Resumed
    | LauncherFailed
    | RunEnded
    | CycleStarted
    | CycleEnded
    | NodeLost
    | Finding
    | SlowRank
    | TrainingAgain
    | SnapshotRestored
    | RestoreFailed
    | Stuck
    | DeviceMemory
    | RankExited
    | MoreTime
    | HangReported
    | WorkloadControl
    | MonitorReplaced
    | ForkServer
)
