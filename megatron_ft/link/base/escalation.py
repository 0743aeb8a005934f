"""Escalation from a process's first signal to SIGKILL, and to the complaint that even SIGKILL had no effect. Pure.

Time in which the process waits for a CPU isn't counted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_STARVED_S = 60.0
"""Most seconds by which a grace is extended in all."""
GRACE_S = 5.0
"""Seconds from the first signal to SIGKILL, and from SIGKILL to the complaint.

Time in which the process waits for a CPU isn't counted: on a busy machine a handler is slow without hanging.
"""


@dataclass
class Grace:
    """Time for a process to end, excluding up to ``MOST_STARVED_S`` in which it waits for a CPU.

    The main thread may wait for a thread that gets no CPU, so the thread that waited longest counts.

    Args:
        due_s: end of the grace; ``check`` may move it.
        run_delays_ns: total CPU wait of each thread, as the grace begins.
    """

    due_s: float
    run_delays_ns: Mapping[int, int]
    _left_s: float = MOST_STARVED_S

    def check(self, now_s: float, run_delays_ns: Mapping[int, int]) -> bool:
        """Extend the grace by the CPU waits since the last call. Return True if it is over, else call again at
        ``due_s``.

        ``run_delays_ns``: current totals.
        """
        # a thread's number may have been reused by a younger one, which has waited less
        waits_ns = (max(0, delay - self.run_delays_ns.get(thread, 0)) for thread, delay in run_delays_ns.items())
        put_off_s = min(max(waits_ns, default=0) / 1e9, self._left_s)
        self.run_delays_ns = run_delays_ns
        self.due_s += put_off_s
        self._left_s -= put_off_s
        return now_s >= self.due_s


class Escalation:
    """Signals to one process. ``due_s`` is the time of the next ``advance``; None once nothing is left to try."""

    def __init__(self, first: signal.Signals, *, due_s: float) -> None:
        self.due_s: float | None = due_s
        self._next: signal.Signals | None = first
        self._grace: Grace | None = None

    def advance(self, now_s: float, run_delays_ns: Callable[[], Mapping[int, int]]) -> signal.Signals | None:
        """Return the signal to send now, if one is due. ``run_delays_ns`` (see `Grace`) is called only then."""
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
        """Make the first signal due now."""
        if self._grace is None:
            self.due_s = now_s
