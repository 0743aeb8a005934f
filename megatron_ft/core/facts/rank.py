"""Records of a training process, which creates its log only with the first record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_ft.core.codec import Cycle, Fact, Finite, Int, Rank, Seconds, WorldSize
from megatron_ft.core.fault_plan import PlannedFault


class FaultInjected(Fact, frozen=True, kw_only=True):
    """This rank is about to carry out a planned or simulated fault.

    Args:
        type: type of the fault: "rank_killed", "rank_hung", ...
        iteration: iteration completed by then; null for a fault after a delay.
    """

    cycle: Cycle
    type: str | None = None
    rank: Rank | None = None
    iteration: Int | None = None


class StateLoaded(Fact, frozen=True, kw_only=True):
    """Learned timeouts were read from a file.

    Args:
        timeouts: timeouts in use, by section.
        superseded: sections whose configured timeout has changed since.
        ignored: sections that this job doesn't have.
        world_size: size of the job that has learned them.
    """

    path: str = ""
    timeouts: Mapping[str, Seconds | None] = {}
    superseded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    world_size: WorldSize | None = None


class TimeoutOrigin(Fact, frozen=True, kw_only=True):
    """Origin of one learned timeout.

    Args:
        timeout_s, previous_s: current and previous value.
        max_observed_s, rank_of_max: the longest interval over all ranks, and its rank.
        margin_s: timeout minus that interval.
    """

    timeout_s: Seconds | None = None
    previous_s: Seconds | None = None
    max_observed_s: Seconds | None = None
    rank_of_max: Rank | None = None
    margin_s: Finite | None = None


class TimeoutsLearned(Fact, frozen=True, kw_only=True):
    """Timeouts were calculated from the intervals of all ranks.

    Args:
        timeouts: timeouts by section, or "initial" and "subsequent" heartbeat.
    """

    timeouts: Mapping[str, TimeoutOrigin] = {}


Record = FaultInjected | StateLoaded | TimeoutsLearned


def not_fired(faults: Iterable[PlannedFault], fired: Iterable[object]) -> list[PlannedFault]:
    """Return the faults without a `FaultInjected` among ``fired`` (of all ranks' event logs)."""
    seen = {(r.cycle, r.rank, r.iteration, r.type) for r in fired if isinstance(r, FaultInjected)}
    return [fault for fault in faults if (fault.cycle, fault.rank, fault.iteration, fault.type) not in seen]
