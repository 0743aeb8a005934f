"""From the signal that is to end a process to SIGKILL, and to the complaint that even that had no effect. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from megatron_ft.core.cpu_starvation import Grace

__all__ = ["GRACE_S", "Escalation"]

GRACE_S = 5.0
"""From the first signal to SIGKILL, and from SIGKILL to the complaint.

What the process waits for a CPU isn't counted: a handler on a busy machine isn't one that hangs.
"""


class Escalation:
    """Of one process. ``due_s`` is when to ``advance``; None once nothing is left to be tried."""

    def __init__(self, first: signal.Signals, *, due_s: float) -> None:
        self.due_s: float | None = due_s
        self._next: signal.Signals | None = first
        self._grace: Grace | None = None

    def advance(self, now_s: float, run_delays_ns: Callable[[], Mapping[int, int]]) -> signal.Signals | None:
        """The signal to send now, if one is due. ``run_delays_ns`` as of `Grace`, asked for only then."""
        if self.due_s is None or now_s < self.due_s:
            return None
        delays_ns = run_delays_ns()
        if self._grace is not None and not self._grace.check(now_s, delays_ns):
            self.due_s = self._grace.due_s
            return None
        number = self._next
        if number is None:
            self.due_s = None
            return None
        self._next = None if number == signal.SIGKILL else signal.SIGKILL
        self.due_s = now_s + GRACE_S
        self._grace = Grace(self.due_s, delays_ns)
        return number

    def begin(self, now_s: float) -> None:
        """Nothing is to be waited for any more before the first signal."""
        if self._grace is None:
            self.due_s = now_s
