"""The spans in which hang detection is paused. Pure."""

from __future__ import annotations

_MOST_PAUSES = 1000


class Pauses:
    """The pauses of hang detection (megatron-ft pause), one after the other, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.since_ns: int | None = None
        """Since when it is paused now; None if it isn't."""
        self._over: list[tuple[int, int]] = []

    def begin(self, now_ns: int) -> bool:
        """Begin a pause; False if there is one already."""
        if self.since_ns is not None:
            return False
        self.since_ns = now_ns
        return True

    def end(self, now_ns: int) -> bool:
        """End the pause; False if there is none."""
        if self.since_ns is None:
            return False
        self._over.append((self.since_ns, now_ns))
        self.since_ns = None
        if len(self._over) > _MOST_PAUSES:
            # two oldest become one that also spans the time between them: errs towards patience
            self._over[:2] = [(self._over[0][0], self._over[1][1])]
        return True

    def within(self, start_ns: int, now_ns: int) -> int:
        """How much of the time from ``start_ns`` to ``now_ns`` was paused."""
        return sum(max(0, min(end, now_ns) - max(start, start_ns)) for start, end in self.spans(now_ns))

    def spans(self, now_ns: int) -> list[tuple[int, int]]:
        """From when to when each pause was, in order; one that isn't over ends with ``now_ns``."""
        return [*self._over, *([] if self.since_ns is None else [(self.since_ns, now_ns)])]
