"""From the signal that is to end a process to SIGKILL, and to the complaint that even that had no effect. Pure.

A machine may be too busy to let a process end: what it waits for a CPU doesn't count.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_STARVED_S = 60.0
"""By how much a grace is put off at most, in all."""
GRACE_S = 5.0
"""From the first signal to SIGKILL, and from SIGKILL to the complaint.

Time in which the process waits for a CPU isn't counted: on a busy machine a handler is slow without hanging.
"""


@dataclass
class Grace:
    """A time to end in: what the process spent waiting for a CPU doesn't count, up to ``MOST_STARVED_S``.

    A thread that the main thread waits for may be the one that gets no CPU, so whichever thread waited longest counts.

    Args:
        due_s: when it is over; later once ``check`` has put it off.
        run_delays_ns: by thread, how long it has waited for a CPU in its life, as the grace begins.
    """

    due_s: float
    run_delays_ns: Mapping[int, int]
    _left_s: float = MOST_STARVED_S

    def check(self, now_s: float, run_delays_ns: Mapping[int, int]) -> bool:
        """Put it off by what threads waited since the last call; returns whether it is over, else ask at ``due_s``.

        ``run_delays_ns``: as they are now.
        """
        # a thread's number may have gone to a younger one, which has waited less
        waits_ns = (max(0, delay - self.run_delays_ns.get(thread, 0)) for thread, delay in run_delays_ns.items())
        put_off_s = min(max(waits_ns, default=0) / 1e9, self._left_s)
        self.run_delays_ns = run_delays_ns
        self.due_s += put_off_s
        self._left_s -= put_off_s
        return now_s >= self.due_s


class Escalation:
    """The signals to one process. ``due_s`` is when to call ``advance``; None once there is nothing left to try."""

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
        """Make the first signal due now."""
        if self._grace is None:
            self.due_s = now_s
