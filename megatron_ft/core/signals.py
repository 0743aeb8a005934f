"""Signals: their names, and which one to stop is a second request, of a user who is in a hurry. Pure."""

from __future__ import annotations

import signal
from enum import Enum

AGAIN_AFTER_S = 5.0
"""A signal so long after the first is a second request. Before, it is the same one: Slurm sends SIGTERM twice within
milliseconds, and who presses Ctrl-C twice in a row hasn't read yet that the ranks are about to end."""


def signal_name(number: int) -> str:
    """As in "SIGKILL"; "signal 35" for one without a name (a real-time one, or none of this system)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Asked(Enum):
    """What one signal asks for."""

    FIRST = "to stop"
    SAME = "what the first has asked"
    AGAIN = "not to wait any more"


class SecondRequest:
    """Notes each signal that asks this process to stop, and decides which is a second request."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def note(self, now_s: float) -> Asked:
        """What the signal that came at ``now_s`` asks for (seconds of any clock that only goes on)."""
        if self._first_s is None:
            self._first_s = now_s
            return Asked.FIRST
        return Asked.AGAIN if now_s - self._first_s >= AGAIN_AFTER_S else Asked.SAME
