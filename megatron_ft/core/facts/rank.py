"""Records of a training process, which writes a log only if it has something to tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_ft.core.codec import Cycle, Rank, Seconds, WorldSize
from megatron_ft.core.fault_plan import PlannedFault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """This rank is about to do what a fault plan, or a simulated fault, has asked for.

    Args:
        type: of the fault: "rank_killed", "rank_hung", ...
        iteration: done by then; null for a fault that comes at a time.
    """

    cycle: Cycle
    type: str | None = None
    rank: Rank | None = None
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """Learned timeouts were read from a file.

    Args:
        timeouts: those that are used, by section.
        superseded: names of those that the configuration has changed since.
        ignored: names of sections that this job doesn't have.
        world_size: of the job that has learned them.
    """

    path: str = ""
    timeouts: Mapping[str, Seconds | None] = field(default_factory=dict)
    superseded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    world_size: WorldSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutOrigin:
    """How one timeout came about.

    Args:
        timeout_s, previous_s: what it is now, and what it was before.
        max_observed_s, rank_of_max: the longest interval over all ranks, and who had it.
        margin_s: what is left above that.
        rule: which one it was learned by, "budget" or "reference".
        first_s: the timeout of the first intervals of a cycle, where it is another one.
    """

    timeout_s: Seconds | None = None
    previous_s: Seconds | None = None
    max_observed_s: Seconds | None = None
    rank_of_max: Rank | None = None
    margin_s: float | None = None
    rule: str | None = None
    first_s: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsLearned:
    """Timeouts were calculated from what all ranks have seen.

    Args:
        timeouts: by section, or "initial" and "subsequent" heartbeat.
    """

    timeouts: Mapping[str, TimeoutOrigin] = field(default_factory=dict)


Record = FaultInjected | StateLoaded | TimeoutsLearned


def not_fired(faults: Iterable[PlannedFault], fired: Iterable[object]) -> list[PlannedFault]:
    """Which faults have no `FaultInjected` among ``fired`` (of all ranks' event logs)."""
    seen = {(r.cycle, r.rank, r.iteration, r.type) for r in fired if isinstance(r, FaultInjected)}
    return [fault for fault in faults if (fault.cycle, fault.rank, fault.iteration, fault.type) not in seen]
