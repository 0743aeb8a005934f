"""Descriptors kept for long in a user's process.

A script, or a library that it uses, may close all descriptors and open files of its own, which get the same numbers.
"""

from __future__ import annotations

import contextlib
import os

_open = os.open
"""Original ``os.open``, for files in /proc/self only, which no file system can delay; replacements aren't called."""


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


def _identity(number: int) -> tuple[int, int, bytes] | None:
    """Return device, inode, and what tells eventfds, which share one inode, apart; None if the number is closed."""
    try:
        facts = os.fstat(number)
        eventfd_id = b""
        if os.readlink(f"/proc/self/fd/{number}").startswith("anon_inode:"):
            fd = _open(f"/proc/self/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                eventfd_id = next(
                    (line for line in os.read(fd, 4096).splitlines() if line.startswith(b"eventfd-id:")), b""
                )
            finally:
                os.close(fd)
        return facts.st_dev, facts.st_ino, eventfd_id
    except OSError:
        return None
