"""What ``ps`` and ``pgrep -f`` show of a forked process: the command that it is, not the one that it comes from."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Room", "room", "set_command_line"]

_PR_SET_NAME = 15
_PR_SET_MM, _PR_SET_MM_ARG_END = 35, 9
_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/PID/stat, counted from 0."""


class Room(NamedTuple):
    """Where in a process's memory the kernel finds its command line."""

    start: int
    end: int


def room() -> Room | None:
    """That of this process and of its forks, if it is known. Asked before there is a shorter command line."""
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        # the process id and the name come before; hidden addresses are 0
        start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    except (OSError, ValueError, IndexError):
        return None
    return Room(start, end) if 0 < start < end else None


def set_command_line(argv: Sequence[str], name: str | None = None, *, room: Room | None = None) -> None:
    """Show ``argv`` as this process's command line, and ``name`` (else that of argv[0]) as its name.

    The room is that of the command line it was started with: a longer one is cut. Only a privileged process can
    tell the kernel where the new one ends; else zeros follow it. Nothing depends on any of this.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, os.fsencode(name or os.path.basename(argv[0])), 0, 0, 0)
    place = room or _room()
    if place is None:
        return
    start, end = place
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(start + max(len(text), 1)), 0, 0)


_room = room
