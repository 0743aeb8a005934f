"""The faults themselves: what a process does to itself in a rehearsal."""

from __future__ import annotations

import os
import signal
import sys

from megatron_ft.link.base.fault_plan import DEFAULT_SLOWER_BY_S


class InjectedFault(RuntimeError):
    """Raised by a fault of type ``exception``."""


def announce(what: str) -> None:
    """Print on stderr, beforehand, that this fault is simulated."""
    print(f"FT: SIMULATED FAULT: {what}", file=sys.stderr, flush=True)


def inject(fault_type: str, *, seconds: float = DEFAULT_SLOWER_BY_S) -> float:
    """Do one fault of :data:`megatron_ft.link.base.fault_plan.FAULT_TYPES` to this process, now.

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
