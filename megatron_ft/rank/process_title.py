"""What ``ps`` and ``pgrep -f`` show of a script that is run ahead, while it waits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["retitle"]

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/PID/stat, counted from 0: where in its memory the kernel finds the command line."""


def retitle(title: str, name: str) -> Callable[[], None]:
    """Show ``title`` as the command line and ``name`` as the process's name; what is returned goes back.

    Nothing depends on any of this.
    """
    libc = ctypes.CDLL(None)
    try:
        with open("/proc/self/stat") as file:
            head, _, tail = file.read().rpartition(")")
        # the process id and the name come before; hidden addresses are 0
        fields = tail.split()
        start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    except (OSError, ValueError, IndexError):
        return lambda: None
    before = head.partition("(")[2].encode()
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    words = ctypes.string_at(start, end - start) if 0 < start < end else b""
    if words:
        ctypes.memmove(start, title.encode()[: len(words) - 1].ljust(len(words), b"\0"), len(words))

    def restore() -> None:
        libc.prctl(_PR_SET_NAME, before, 0, 0, 0)
        if words:
            ctypes.memmove(start, words, len(words))

    return restore
