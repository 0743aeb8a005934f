"""Two requests to the Linux kernel that the standard library has no call for."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# loaded at import, because die_with_parent runs between fork and exec where nothing may be loaded
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the *thread* that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on_without_parent() -> None:
    """Ask the kernel to continue this process, if it is stopped then, when the thread that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of those of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
