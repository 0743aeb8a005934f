"""Records of a launcher about the job and its cycles; those about its ranks are in `launcher_ranks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.codec import Count, Cycle, LocalRank, Moment, Pid, Rank, Seconds, WorldSize
from megatron_ft.core.device_memory import Holding
from megatron_ft.core.process_facts import ProcessFacts
from megatron_ft.core.records.launcher_ranks import (
    Finding,
    ForkFailed,
    ForkServer,
    FreshInterpreters,
    MonitorReplaced,
    MoreTime,
    NoCollective,
    RankExited,
    WorkloadControl,
    WouldHaveEnded,
)

__all__ = [
    "Abandoned",
    "Cause",
    "Config",
    "CycleEnded",
    "CycleStarted",
    "DeviceMemory",
    "Finding",
    "ForkFailed",
    "ForkServer",
    "FreshInterpreters",
    "LauncherFailed",
    "Meeting",
    "MonitorReplaced",
    "MoreTime",
    "NoCollective",
    "NodeHealth",
    "Paused",
    "RankExited",
    "Record",
    "Resumed",
    "RunEnded",
    "Setting",
    "SignalForwarded",
    "StartedRank",
    "StopRequested",
    "Stuck",
    "TrainingAgain",
    "WorkloadControl",
    "WouldHaveEnded",
]


# -- the job ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The value of one option.

    Args:
        source: "default", "command line", or the place in a file.
    """

    value: Any = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of the launcher.

    Args:
        values: values by option.
        command: command of a rank.
    """

    values: Mapping[str, Setting] = field(default_factory=dict)
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the launchers of the job meet.

    Args:
        how: "coordinated", "alone".
        endpoints: ``host:port`` each, where the job is coordinated.
        rank: of this launcher, if it was given one; ``rank_from`` is the option or variable that gave it.
    """

    how: str = ""
    endpoints: tuple[str, ...] = ()
    rank: Count | None = None
    rank_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The health check command has run on this node.

    Args:
        cycle: cycle about to begin.
        good: true if the node is fit.
        exit_code: null if the command had to be killed.
        text: how it ended; empty if it succeeded.
        last_line: last line of its output.
    """

    cycle: Cycle
    good: bool
    exit_code: int | None = None
    text: str = ""
    last_line: str = ""
    seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The launcher was asked to stop.

    Args:
        signal: name of the signal.
        ranks: number of ranks that got the signal, too.
    """

    signal: str = ""
    ranks: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The launcher ends its ranks and leaves the job, of its own accord.

    Args:
        text: what is gone: the process that started the launcher, or the reader of its output.
    """

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalForwarded:
    """A signal was forwarded to the ranks (--ft-forward-signals).

    Args:
        signal: name of the signal.
        local_ranks: ranks that got it.
        unready: local ranks without a handler for it, which it would only have ended.
    """

    signal: str = ""
    local_ranks: tuple[LocalRank, ...] = ()
    unready: tuple[LocalRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Hang detection on this node is paused.

    Args:
        by: process that asked for it.
    """

    by: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Hang detection on this node is on again.

    Args:
        by: process that asked for it.
    """

    by: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFailed:
    """The launcher itself has failed, by an unforeseen error: its node is lost to the others.

    Args:
        text: the printed line.
        traceback: Python's traceback.
    """

    text: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last record of a launcher that has ended by itself."""

    exit_code: int | None = None


# -- its cycles -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """A rank's process."""

    rank: Rank
    local_rank: LocalRank | None = None
    pid: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleStarted:
    """The ranks of this node were created.

    Args:
        ranks: ranks of this node.
        group_rank: GROUP_RANK of this node.
        world_size: number of ranks on all nodes.
        restarts_left: remaining ones of ``max_restarts``.
        met_ns: when all nodes had met.
        spawned_ns: when the last of these ranks was created.
    """

    cycle: Cycle
    ranks: tuple[StartedRank, ...] = ()
    group_rank: Count | None = None
    world_size: WorldSize | None = None
    max_restarts: Count | None = None
    restarts_left: Count | None = None
    met_ns: Moment | None = None
    spawned_ns: Moment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a cycle ended.

    Args:
        rank: rank at fault; null if none is, or if unknown.
        kind: "hang", "crash", "signal", "request", "membership".
        text: the printed line.
        detail: details of the evidence; empty if there are none.
        host: node at fault; empty if unknown.
    """

    rank: Rank | None = None
    kind: str | None = None
    text: str | None = None
    detail: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEnded:
    """A cycle is over on this node: its ranks have ended.

    Args:
        outcome: "succeeded", "failed" or "stopped".
        cause: null if nothing failed. Of several nodes, one knows it best: not one that only says "membership".
        action: what follows: "restart", "finish", ...
        iteration: iteration completed at the end, by the rank at fault if there is one.
    """

    cycle: Cycle
    outcome: str = "unknown"
    cause: Cause | None = None
    action: str = ""
    iteration: int | None = None
    restarts_left: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAgain:
    """All ranks of this node are through their first step after a restart.

    Args:
        seconds: duration of each phase since the fault was detected.
    """

    cycle: Cycle
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Processes of ranks can't be killed."""

    cycle: Cycle
    processes: tuple[ProcessFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of ended ranks was waited for.

    Args:
        held: memory that was still held when the wait ended.
    """

    waited_s: Seconds
    held: tuple[Holding, ...] = ()


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
    | Finding
    | NoCollective
    | TrainingAgain
    | Stuck
    | DeviceMemory
    | RankExited
    | MoreTime
    | WouldHaveEnded
    | WorkloadControl
    | MonitorReplaced
    | ForkServer
    | ForkFailed
    | FreshInterpreters
)
