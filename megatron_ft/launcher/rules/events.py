"""Events of the launcher's machine.

Effects of the launcher's member of the control plane (`Begin` and `Leave` of `job.rules.actions`), and messages of the
coordinator that it passes on (`End`, `Verdict`, messages of parts), are events here; so is a rank's `WorkloadControl`.
Times are nanoseconds of CLOCK_MONOTONIC unless a name says otherwise.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.job.rules import actions as job
from megatron_ft.job.rules.messages import OfCycle, StockTaken
from megatron_ft.link.base.codec import Fact
from megatron_ft.link.base.control import WorkloadControl
from megatron_ft.link.base.launcher_part import PartEvent
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.link.base.process_facts import ProcessFacts
from megatron_ft.link.facts.launcher import Abandoned, Cause, NodeHealth, RankExited, RankStarted
from megatron_ft.link.messages.monitor_messages import RankReport


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


FromLauncher = Tick | StopAsked | Abandoned | Continued | NodeHealth | WorkloadControl
FromRanks = RanksMet | RankStarted | RanksStarted | NotStarted | RankExited | RanksEnded | MonitorReport
FromCoordinator = job.Begin | job.StandBy | OfCycle | job.PrintsJobLines | job.LeftOut | job.Leave
OfParts = PartEvent | StockTaken | Fact
Event = FromLauncher | FromRanks | FromCoordinator | OfParts
