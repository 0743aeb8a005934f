"""Faults on purpose, for rehearsals: what a process does to itself, and the faults of a plan at their iterations."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.rank.faults.plan import DEFAULT_SLOWER_BY_S, PlannedFault, read_fault_plan
from megatron_ft.rank.hooks.run_facts import log_fault
from megatron_ft.rank.hooks.user_errors import end_job


class InjectedFault(RuntimeError):
    """Raised by a fault of type ``exception``."""


def announce(what: str) -> None:
    """Print on stderr, beforehand, that this fault is simulated."""
    print(f"FT: SIMULATED FAULT: {what}", file=sys.stderr, flush=True)


def inject(fault_type: str, *, seconds: float = DEFAULT_SLOWER_BY_S) -> float:
    """Do one fault of `megatron_ft.rank.faults.plan.FAULT_TYPES` to this process, now.

    Return the seconds by which the caller is to slow down each later step: ``seconds`` for ``slow``, else 0
    (``rank_hung``, once the process has been continued). Those of ``IN_LOOP_TYPES`` are for the thread that trains.

    Raises:
        InjectedFault: for ``exception``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    match fault_type:
        case "rank_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "rank_hung":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            return seconds
        case "exception":
            raise InjectedFault("simulated fault")
        case _:
            raise AssertionError(fault_type)
    return 0.0


class FaultInjector:
    """Carries out the faults that a plan has for this process; call ``on_iteration`` in each iteration."""

    def __init__(self, faults: Iterable[PlannedFault], *, rank: int, cycle: int, client: Any = None) -> None:
        """Args:
        faults: the whole plan, of all ranks and cycles.
        rank: this process.
        cycle: the cycle it lives in.
        client: the RankMonitorClient to whose event log a fault is written before it happens, or None.
        """
        self._client = client
        self._slower_by_s = 0.0
        self._pending = {fault.iteration: fault for fault in faults if (fault.cycle, fault.rank) == (cycle, rank)}

    @classmethod
    def of_this_rank(cls, path: str | os.PathLike[str] | None, *, client: Any) -> FaultInjector:
        """Carry out the plan in a YAML file in this process, a rank of ``ft_launcher``; None is no plan.

        A plan that can't be carried out ends the job, with one line and without a restart.

        Raises:
            SystemExit: the plan can't be read or doesn't fit this job; on all ranks alike.
        """
        rank, world_size, cycle = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "FT_CYCLE"))
        try:
            faults = () if path is None else read_fault_plan(path, world_size)
        except ConfigError as error:
            end_job(str(error))
        return cls(faults, rank=rank, cycle=cycle, client=client)

    def on_iteration(self, iteration: int) -> None:
        """Inject the fault planned for this iteration, if any, once.

        Raises:
            InjectedFault: that is what was planned.
        """
        fault = self._pending.pop(iteration, None)
        if fault is not None:
            log_fault(self._client, fault.type, fault.iteration)
            announce(fault.describe())
            self._slower_by_s = inject(fault.type, seconds=fault.seconds) or self._slower_by_s
        if self._slower_by_s:
            time.sleep(self._slower_by_s)
