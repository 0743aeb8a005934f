"""The faults themselves: what a process does to itself in a rehearsal."""

from __future__ import annotations

import os
import signal
import sys
import time

from megatron_ft.core.fault_plan import DEFAULT_SLOWER_BY_S


class InjectedFault(RuntimeError):
    """Raised by a fault of type ``exception``."""


class Slowness:
    """Seconds by which each step of this process is slowed down: 0 until a fault of type ``slow``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_step(self) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def announce(what: str) -> None:
    """Print on stderr, beforehand, that this fault is simulated."""
    print(f"FT: SIMULATED FAULT: {what}", file=sys.stderr, flush=True)


def inject(fault_type: str, *, seconds: float = DEFAULT_SLOWER_BY_S, slowness: Slowness | None = None) -> None:
    """Do one fault of :data:`megatron_ft.core.fault_plan.FAULT_TYPES` to this process, now.

    Returns after ``slow``, and after ``rank_hung`` once the process has been continued. Those of ``IN_LOOP_TYPES`` are
    for the thread that trains.

    Args:
        fault_type: which.
        seconds: for ``slow``: how much longer each step takes.
        slowness: for ``slow``: whose ``on_step`` is called in each step.

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
            assert slowness is not None
            slowness.seconds = seconds
        case "exception":
            raise InjectedFault("simulated fault")
        case _:
            raise AssertionError(fault_type)
