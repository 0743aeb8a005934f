"""Records of a training process, which creates its log only with the first record."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ft.link.base.codec import Cycle, Fact, Int, Rank
from megatron_ft.link.base.fault_plan import PlannedFault


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


Record = FaultInjected


def not_fired(faults: Iterable[PlannedFault], fired: Iterable[object]) -> list[PlannedFault]:
    """Return the faults without a `FaultInjected` among ``fired`` (of all ranks' event logs)."""
    seen = {(r.cycle, r.rank, r.iteration, r.type) for r in fired if isinstance(r, FaultInjected)}
    return [fault for fault in faults if (fault.cycle, fault.rank, fault.iteration, fault.type) not in seen]
