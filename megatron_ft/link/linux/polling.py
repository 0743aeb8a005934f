"""Waiting for one descriptor: a connection, or a process."""

from __future__ import annotations

import select
import time


def wait_ready(fd: int, event: int, deadline_s: float) -> bool:
    """Wait for ``event``, an error, a hang-up, or the deadline (time.monotonic). Return False at the deadline."""
    poller = select.poll()
    poller.register(fd, event)
    while True:
        left_s = deadline_s - time.monotonic()
        if poller.poll(max(0.0, left_s) * 1e3):
            return True
        if left_s <= 0:
            return False


def has_hung_up(fd: int) -> bool:
    """Return True if the other end of a pipe or a socket is closed."""
    return wait_ready(fd, 0, 0.0)  # errors and hang-ups are always reported
