"""Faults on purpose: carries out a fault plan inside the rank that it names."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from megatron_ft.core.fault_plan import PlannedFault, due, resolve
from megatron_ft.ipc.fault_plan_file import read_fault_plan
from megatron_ft.rank.learning import log_event

__all__ = ["FaultInjector", "InjectedFault", "inject"]


class InjectedFault(RuntimeError):
    """What a fault of type ``exception`` raises."""


class FaultInjector:
    """Asked once per iteration; does something to this process if the plan says so."""

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
        self._pending = [
            fault for fault in faults if fault.cycle > cycle or (fault.cycle == cycle and fault.rank == rank)
        ]
        self._mine = frozenset(fault.iteration for fault in self._pending if fault.cycle == cycle)

    @classmethod
    def from_plan_file(
        cls, path: str | os.PathLike[str], *, rank: int, world_size: int, cycle: int, client: Any = None
    ) -> FaultInjector:
        """Carry out the plan in a YAML file.

        Raises:
            ConfigError: the plan can't be read or doesn't fit a job of ``world_size`` ranks; one line.
        """
        return cls(resolve(read_fault_plan(path), world_size), rank=rank, cycle=cycle, client=client)

    @classmethod
    def disabled(cls) -> FaultInjector:
        """One that never does anything."""
        return cls((), rank=0, cycle=0)

    def on_iteration(self, iteration: int) -> None:
        """Do what is planned for this iteration, which usually is nothing.

        Raises:
            InjectedFault: that is what was planned.
        """
        if iteration not in self._mine:
            return
        fault = due(self._pending, self._cycle, self._rank, iteration)
        if fault is None:  # it has fired, and this process has outlived it
            return
        self._pending.remove(fault)
        log_event(
            self._client,
            "fault_injected",
            type=fault.type,
            rank=fault.rank,
            iteration=fault.iteration,
            cycle=fault.cycle,
        )
        print(f"FT: injected fault: {fault.describe()}", file=sys.stderr, flush=True)
        inject(fault.type, exit_code=fault.exit_code)

    def pending(self) -> list[PlannedFault]:
        """What hasn't happened, as far as this rank can know: its own of this cycle, all of later ones."""
        return list(self._pending)


def inject(fault_type: str, *, exit_code: int = 1) -> None:
    """Do one fault of :data:`megatron_ft.core.fault_plan.FAULT_TYPES` to this process, now.

    Returns only after ``rank_hung``, once somebody has continued the process.

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
        case "sleep":
            _sleep()
        case "spin":
            _spin()
        case "exception":
            raise InjectedFault("injected fault")
        case "exit":
            os._exit(exit_code)
        case "segfault":
            _segfault()
        case _:
            raise AssertionError(fault_type)


def _sleep() -> NoReturn:
    while True:
        time.sleep(3600.0)


def _spin() -> NoReturn:
    while True:
        pass


def _segfault() -> None:
    # nobody wants the core dump of a process that did what it was told
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)
