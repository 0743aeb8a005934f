"""Faults for Megatron-LM's fault injector, under the names of ``nvidia_resiliency_ext.shared_utils.inject_fault``.

Each is announced on stderr before it happens. The rank is reported afterwards as after a real fault.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron_ft.rank.faults.injection import announce

_GPU_CYCLES = 1 << 62
_due = threading.Event()


class Fault(enum.Enum):
    """Kinds of faults, with the reference's names and numbers."""

    GPU_ERROR = 1
    GPU_SLEEP = 2
    WORKLOAD_EXC = 3
    ASYNC_EXC = 4
    SIGNAL_EXC = 5
    OS_ABORT = 6
    LOCK_GIL = 7
    SEGFAULT = 8
    SIGINT = 9
    SIGKILL = 10
    SIGTERM = 11
    SIGSTOP = 12


class InjectedException(Exception):
    """Raised in the training thread by the faults that are exceptions."""


def dispatch_fault_injection(fault: Fault, delay: float, callback: Callable[[], Any] | None) -> None:
    """Inject a fault into this process after ``delay`` seconds, ``callback`` right before it. Returns at once."""
    if fault is Fault.SIGNAL_EXC:  # only the main thread can set the handler
        signal.signal(signal.SIGUSR1, _raise)
    device = 0
    if fault in (Fault.GPU_ERROR, Fault.GPU_SLEEP):
        import torch

        device = torch.cuda.current_device()  # of this thread

    def when_due() -> None:
        time.sleep(delay)
        announce(f"rank {os.environ.get('RANK', '0')}: {fault.name}")
        if callback is not None:
            callback()
        _carry_out(fault, device)

    threading.Thread(target=when_due, name="ft-injected-fault", daemon=True).start()


def maybe_raise_workload_exception() -> None:
    """Raise the exception of a ``WORKLOAD_EXC`` that is due; the training loop calls this in each iteration.

    Raises:
        InjectedException: it is due.
    """
    if _due.is_set():
        _due.clear()
        raise InjectedException


def clear_workload_exception() -> None:
    """Forget a ``WORKLOAD_EXC`` that is due."""
    _due.clear()


def _carry_out(fault: Fault, device: int) -> None:
    match fault:
        case Fault.WORKLOAD_EXC:
            _due.set()
        case Fault.ASYNC_EXC:
            thread = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(InjectedException))
        case Fault.SIGNAL_EXC:
            os.kill(os.getpid(), signal.SIGUSR1)
        case Fault.OS_ABORT:
            os.abort()
        case Fault.LOCK_GIL:
            while True:
                ctypes.PyDLL(None).pause()  # a call by PyDLL keeps the GIL
        case Fault.SEGFAULT:
            ctypes.string_at(1)
        case Fault.GPU_ERROR | Fault.GPU_SLEEP:
            _harm_gpu(fault, device)
        case _:
            os.kill(os.getpid(), signal.Signals[fault.name])


def _harm_gpu(fault: Fault, device: int) -> None:
    import torch

    torch.cuda.set_device(device)
    if fault is Fault.GPU_SLEEP:
        vars(torch.cuda)["_sleep"](_GPU_CYCLES)
        return
    one = torch.ones(1, dtype=torch.int64, device="cuda")
    one[one] = 0  # out of bounds: a device-side assertion


def _raise(number: int, frame: FrameType | None) -> None:
    if not sys.is_finalizing():
        raise InjectedException
