"""Requests to the Linux kernel that the standard library has no call for."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME, _PR_GET_NAME = 15, 16
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


def set_name(name: bytes) -> bytes:
    """What the kernel, and ps, call this process; returns what it was called."""
    before = ctypes.create_string_buffer(16)
    _libc.prctl(_PR_GET_NAME, before, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
    return before.value


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
