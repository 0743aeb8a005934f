"""How long a process may take to end, on a machine that may be too busy to let it. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MOST_STARVED_S", "Grace"]

MOST_STARVED_S = 60.0
"""By how much a grace is put off at most, in all."""


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
