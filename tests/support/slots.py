"""Limits how many tests run at a time on this machine, over all copies of the suite that run there side by side.

Without it two copies start twice as many tests, which slow each other down until one exceeds its time limit.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Slots"]

_LOOK_S = 0.02
_LONGEST_WAIT_S = 300.0


class Slots:
    """``count`` of them, bytes of a file that all copies lock. A lock ends with its process, whatever that forked."""

    def __init__(self, path: Path, count: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._count = count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have one, as soon as one is free; go on without one if that takes too long."""
        until_s = time.monotonic() + _LONGEST_WAIT_S
        while (slot := self.take()) is None and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if slot is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)

    def take(self) -> int | None:
        for slot in range(self._count):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except (BlockingIOError, PermissionError):  # which one depends on the system
                continue
            return slot
        return None
