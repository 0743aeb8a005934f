"""Carries out a fault plan inside the ranks that it names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from megatron_ft.config.files.fault_plan_file import read_fault_plan
from megatron_ft.errors import ConfigError
from megatron_ft.link.base.fault_plan import PlannedFault, due, resolve
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.rank.faults.acts import announce, inject
from megatron_ft.rank.hooks.run_facts import log_event
from megatron_ft.rank.hooks.user_errors import end_job


class FaultInjector:
    """Carries out the faults that a plan has for this process; call ``on_iteration`` in each iteration."""

    def __init__(self, faults: Iterable[PlannedFault], *, rank: int, cycle: int, client: Any = None) -> None:
        """Args:
        faults: the whole plan, of all ranks and cycles.
        rank: this process.
        cycle: the cycle it lives in.
        client: the RankMonitorClient to whose event log a fault is written before it happens, or None.
        """
        self._rank = rank
        self._cycle = cycle
        self._client = client
        self._slower_by_s = 0.0
        self._pending = [
            fault for fault in faults if fault.cycle > cycle or (fault.cycle == cycle and fault.rank == rank)
        ]
        self._mine = frozenset(fault.iteration for fault in self._pending if fault.cycle == cycle)

    @classmethod
    def of_this_rank(cls, path: str | os.PathLike[str] | None, *, client: Any) -> FaultInjector:
        """Carry out the plan in a YAML file in this process, a rank of ``ft_launcher``; None is no plan.

        A plan that can't be carried out ends the job, with one line and without a restart.

        Raises:
            SystemExit: the plan can't be read or doesn't fit this job; on all ranks alike.
        """
        if path is None:
            return cls((), rank=0, cycle=0)
        rank, world_size, cycle = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "FT_CYCLE"))
        try:
            faults = resolve(read_fault_plan(path), world_size)
        except ConfigError as error:
            end_job(str(error))
        return cls(faults, rank=rank, cycle=cycle, client=client)

    def on_iteration(self, iteration: int) -> None:
        """Inject the fault planned for this iteration, if any.

        Raises:
            InjectedFault: that is what was planned.
        """
        if iteration in self._mine:
            fault = due(self._pending, self._cycle, self._rank, iteration)
            if fault is not None:  # None: it has fired, and this process has survived it
                self._carry_out(fault)
        if self._slower_by_s:
            time.sleep(self._slower_by_s)

    def pending(self) -> list[PlannedFault]:
        """Return the faults still to come that this rank knows: its own of this cycle, and all of later cycles."""
        return list(self._pending)

    def _carry_out(self, fault: PlannedFault) -> None:
        self._pending.remove(fault)
        record = FaultInjected(type=fault.type, rank=fault.rank, iteration=fault.iteration, cycle=fault.cycle)
        log_event(self._client, record)
        announce(fault.describe())
        self._slower_by_s = inject(fault.type, seconds=fault.seconds) or self._slower_by_s
