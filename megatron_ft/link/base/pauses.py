"""Pauses of hang detection. Pure."""

from __future__ import annotations

_MOST_PAUSES = 1000


class Pauses:
    """Pauses of hang detection (megatron-ft pause) in order, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.since_ns: int | None = None
        """Start of the current pause; None if there is none."""
        self._over: list[tuple[int, int]] = []

    def begin(self, now_ns: int) -> bool:
        """Begin a pause. Return False if there is one already."""
        if self.since_ns is not None:
            return False
        self.since_ns = now_ns
        return True

    def end(self, now_ns: int) -> bool:
        """End the pause. Return False if there is none."""
        if self.since_ns is None:
            return False
        self._over.append((self.since_ns, now_ns))
        self.since_ns = None
        if len(self._over) > _MOST_PAUSES:
            # the two oldest become one that includes the time between them: fewer hangs, never a false one
            self._over[:2] = [(self._over[0][0], self._over[1][1])]
        return True

    def within(self, start_ns: int, now_ns: int) -> int:
        """Return the paused time between ``start_ns`` and ``now_ns``."""
        return sum(max(0, min(end, now_ns) - max(start, start_ns)) for start, end in self.spans(now_ns))

    def spans(self, now_ns: int) -> list[tuple[int, int]]:
        """Return start and end of each pause, in order; a current one ends with ``now_ns``."""
        return [*self._over, *([] if self.since_ns is None else [(self.since_ns, now_ns)])]
