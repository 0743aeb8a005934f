"""Which planned faults the event logs know of. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ft.core.fault_plan import PlannedFault
from megatron_ft.core.records.all_kinds import Record
from megatron_ft.core.records.rank import FaultInjected

__all__ = ["not_fired"]


def not_fired(faults: Iterable[PlannedFault], fired: Iterable[Record]) -> list[PlannedFault]:
    """Which faults have no `FaultInjected` among ``fired`` (of all ranks' event logs)."""
    seen = {(r.cycle, r.rank, r.iteration, r.type) for r in fired if isinstance(r, FaultInjected)}
    return [fault for fault in faults if (fault.cycle, fault.rank, fault.iteration, fault.type) not in seen]
