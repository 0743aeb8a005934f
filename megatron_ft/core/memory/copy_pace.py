"""Which snapshots a node copies to another one, where copies take longer than the interval. Pure.

A snapshot is complete once all nodes have copied it, so they must copy the same ones, though each is busy for another
time. Each copies the iterations that are multiples of its stride, a power of 2: slow and quick nodes have those of the
slowest in common. One that is due while the node is busy waits, so that nodes which wait for each other's copies don't
miss each other again and again.
"""

from __future__ import annotations

import math

_CALM = 32
"""Copies in a row, each begun as soon as it was due, after which a node copies more often again."""


class CopyPace:
    """The pace of one node in one cycle."""

    def __init__(self) -> None:
        self.waiting: int | None = None
        """Iteration to copy next; None: the next one that is due hasn't come."""
        self._seen = self._step = 0
        self._stride = 1
        self._calm = 0

    def saw(self, iteration: int, *, is_free: bool) -> None:
        """Note the newest snapshot. ``is_free``: the copy before is done, and it is decided whether it is complete."""
        if iteration <= self._seen:
            return
        self._seen, self._step = iteration, math.gcd(self._step, iteration)
        if iteration % max(1, self._step * self._stride):
            return
        if is_free and self.waiting is None:
            self._calm += 1
            if self._calm > _CALM and self._stride > 1:
                self._stride, self._calm = self._stride // 2, 0
        else:
            self._stride, self._calm = 2 * self._stride, 0
        self.waiting = iteration

    def take(self) -> int | None:
        """Return what is copied now."""
        taken, self.waiting = self.waiting, None
        return taken
