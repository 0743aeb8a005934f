"""Records of a launcher: of the job and its cycles; those on its ranks are in `launcher_ranks`."""

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
        values: by option.
        command: of a rank.
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
        cycle: that it was run for.
        good: whether the node is fit.
        exit_code: null if the command had to be killed.
        text: how it ended; empty if well.
        last_line: that it wrote.
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
        signal: its name.
        ranks: how many ranks it was forwarded to.
    """

    signal: str = ""
    ranks: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The launcher ends its ranks and leaves the job, of its own accord.

    Args:
        text: what is gone: the process that has started it, or a reader of its output.
    """

    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalForwarded:
    """A signal was forwarded to the ranks (--ft-forward-signals).

    Args:
        signal: its name.
        local_ranks: who got it.
        unready: local ranks that have no handler for it, so that it would only have ended them.
    """

    signal: str = ""
    local_ranks: tuple[LocalRank, ...] = ()
    unready: tuple[LocalRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """No rank of this node is found hung from now on.

    Args:
        by: the process that asked for it.
    """

    by: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Hang detection on this node is on again.

    Args:
        by: the process that asked for it.
    """

    by: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFailed:
    """The launcher itself has failed, by an unforeseen error: its node is lost to the others.

    Args:
        text: as it prints it.
        traceback: Python's.
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
        ranks: of this node.
        group_rank: of this node.
        world_size: ranks of all nodes.
        restarts_left: of ``max_restarts``.
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
        rank: that caused it; null if none did, or if it isn't known.
        kind: "hang", "crash", "signal", "request", "membership".
        text: as the launcher prints it.
        detail: what the evidence adds; host: of the node whose fault it was. Empty if nothing is known.
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
        cause: null if nothing failed. Of several nodes, one knows it best: those that only say "membership" don't.
        action: what follows: "restart", "finish", ...
        iteration: done when the cycle ended, by the rank that caused it if one did.
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
        seconds: by phase, where the time since the fault was detected went.
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
    """How long memory of ended ranks was waited for.

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
