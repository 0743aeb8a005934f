"""Descriptors kept for long in a user's process.

A script, or a library that it uses, may close all descriptors and open files of its own, which get the same numbers.
"""

from __future__ import annotations

import contextlib
import os

_ANONYMOUS = "anon_inode:"
_open = os.open
"""Original ``os.open``, for files in /proc/self only, which no file system can delay; replacements aren't called."""
_EVENTFD_ID = "eventfd-id:"


class KeptDescriptor:
    """A descriptor with the identity of its file. Check ``is_ours`` before each use of ``number``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = _identity(number)

    @property
    def is_ours(self) -> bool:
        """True while the number stands for the same file."""
        return self.number >= 0 and self._identity is not None and _identity(self.number) == self._identity

    def close(self) -> None:
        """Close the descriptor, unless the number belongs to another file by now. Idempotent."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                os.close(self.number)
        self.number = -1


def _identity(number: int) -> tuple[int, int, str] | None:
    """Return device, inode, and an eventfd's id, since all eventfds share one inode; None if it is closed."""
    try:
        facts = os.fstat(number)
        link = os.readlink(f"/proc/self/fd/{number}")
        return facts.st_dev, facts.st_ino, _eventfd_id(number) if link.startswith(_ANONYMOUS) else ""
    except OSError:
        return None


def _eventfd_id(number: int) -> str:
    fd = _open(f"/proc/self/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(fd, 4096).decode().splitlines()
    finally:
        os.close(fd)
    return next((line for line in lines if line.startswith(_EVENTFD_ID)), "")
