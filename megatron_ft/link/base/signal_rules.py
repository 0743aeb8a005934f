"""Names of signals, and the rule for a second request to stop, of an impatient user. Pure."""

from __future__ import annotations

import signal
from enum import Enum

AGAIN_AFTER_S = 5.0
"""Seconds after which a further signal is a second request. Before, it counts as the same one: Slurm sends SIGTERM
twice within milliseconds, and after Ctrl-C twice in a row nobody has read yet that the ranks are about to end."""


def signal_name(number: int) -> str:
    """Return a name as "SIGKILL"; "signal 35" for a signal without one (real-time, or unknown here)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_words(code: int) -> str:
    """Format an exit code in the form of ``subprocess``."""
    return f"code {code}" if code >= 0 else signal_name(-code)


class Asked(Enum):
    """Meaning of one signal."""

    FIRST = "to stop"
    SAME = "what the first has asked"
    AGAIN = "not to wait any more"


class SecondRequest:
    """Decides which signals to stop this process are a second request."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def note(self, now_s: float) -> Asked:
        """Return the meaning of a signal at ``now_s``, seconds of any clock that never goes back."""
        if self._first_s is None:
            self._first_s = now_s
            return Asked.FIRST
        return Asked.AGAIN if self.wait_s(now_s) <= 0 else Asked.SAME

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a further signal is a second request; 0 or less if it is one now."""
        return 0.0 if self._first_s is None else self._first_s + AGAIN_AFTER_S - now_s
