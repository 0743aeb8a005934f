"""How often to save a memory checkpoint, from what one costs and how often the job fails. Pure.

Each rank decides for itself, from its own costs. Intervals are powers of two, so that ranks that decide differently
still save common iterations: those of the longest interval.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

MOST_OF_TRAINING = 0.01
"""Largest part of training that snapshots may hold up."""
_PRIOR_S = 3600.0
"""Time to the next failure that is assumed of a job about which nothing is known."""
_LEAST_COSTS = 3
_REMEMBERED = 8
_LONGEST = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """Decision. ``reason``: for a line."""

    every: int
    reason: str


def choose(cost_s: float, step_s: float, *, restarts: int, ran_s: float, current: int = 0) -> Interval:
    """Return the interval that loses the least to snapshots and to iterations redone (Young 1974), and its reason.

    Args:
        cost_s: for which one snapshot holds up training.
        step_s: of an iteration without one.
        restarts: of the job in ``ran_s`` seconds.
        current: the interval in force, which is kept if half of it would be right; 0 for none.
    """
    failure_s = (ran_s + _PRIOR_S) / (restarts + 1)
    young_s, bound_s = math.sqrt(2 * cost_s * failure_s), cost_s / MOST_OF_TRAINING
    step_s = max(step_s, 1e-6)
    young, bound = (math.log2(max(1.0, seconds / step_s)) for seconds in (young_s, bound_s))
    every = 1 << min(_LONGEST, max(round(young), math.ceil(bound)))
    if 2 * every == current:
        every = current
    why = f"a failure is expected every {failure_s / 60:.0f} min"
    if bound_s > young_s:
        why = f"so that snapshots take {MOST_OF_TRAINING:.0%} at most"
    return Interval(every, f"one holds up training for {1000 * cost_s:.3g} ms, {why}")


class Pace:
    """Costs and steps of one rank, and the interval that follows. Until some snapshots have a cost: every iteration."""

    def __init__(self) -> None:
        self.interval = Interval(1, "")
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: tuple[int, float] | None = None
        self._has_new = False
        self._held_s = 0.0
        """Seconds for which training was held up since the last call of `at`."""

    def begin(self) -> None:
        """Note that a snapshot begins."""
        self._costs.append(0.0)
        self._has_new = True

    def held(self, seconds: float) -> None:
        """Note time in which the last snapshot has held up training."""
        if self._costs:
            self._costs[-1] += seconds
            self._held_s += seconds

    def at(self, iteration: int, now_s: float, *, restarts: int, ran_s: float) -> int:
        """Return the interval in force from this iteration on. Called before each, whether it is saved or not."""
        if self._last is not None and iteration > self._last[0]:
            self._steps.append((now_s - self._last[1] - self._held_s) / (iteration - self._last[0]))
        self._last, self._held_s = (iteration, now_s), 0.0
        if self._has_new and len(self._costs) >= _LEAST_COSTS and self._steps:
            self._has_new = False
            current = self.interval.every if self.interval.reason else 0
            cost_s, step_s = median(self._costs), median(self._steps)
            self.interval = choose(cost_s, step_s, restarts=restarts, ran_s=ran_s, current=current)
        return self.interval.every
