"""Faults of the campaign beside those of the package: ways to hang, and to crash."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

from megatron_ft.rank.faults import acts

_MUTEX_BYTES = 128  # more than a pthread_mutex_t has anywhere; zeros are an unlocked one on Linux


def inject(fault_type: str, *, exit_code: int) -> None:
    """Do one fault to this process, now, as ``acts.inject`` does those of the package."""
    sys.stdout.flush()
    sys.stderr.flush()
    match fault_type:
        case "sleep":
            while True:
                time.sleep(3600.0)
        case "gil":
            _hold_the_gil()
        case "exit":
            os._exit(exit_code)
        case "segfault":
            # a core dump of an injected fault is of no use
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.string_at(0)
        case _:
            acts.inject(fault_type)


def _hold_the_gil() -> None:
    """Lock a mutex twice, in a C function that is called with the GIL held: the deadlock that extensions have.

    Nothing in Python runs any more in any thread, signal handlers included, and no signal ends the wait.
    """
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    lock(mutex)
    lock(mutex)
