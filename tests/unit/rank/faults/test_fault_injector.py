"""The fault injector: at its moment, once."""

from __future__ import annotations

import pytest

from megatron_ft.rank.faults.injection import FaultInjector, InjectedFault
from megatron_ft.rank.faults.plan import PlannedFault

FAULTS = (
    PlannedFault(cycle=0, rank=1, iteration=25, type="exception"),
    PlannedFault(cycle=0, rank=0, iteration=26, type="exception"),
    PlannedFault(cycle=1, rank=1, iteration=26, type="exception"),
)


def test_fault_is_injected_at_its_iteration_and_once() -> None:
    injector = FaultInjector(FAULTS, rank=1, cycle=0)
    for iteration in range(25):
        injector.on_iteration(iteration)
    with pytest.raises(InjectedFault):
        injector.on_iteration(25)
    for iteration in (25, 26):
        injector.on_iteration(iteration)
