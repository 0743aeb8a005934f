"""Silence after which a peer counts as lost, intervals between signs of life, and the clock for both. Pure.

A silent launcher says little: its host may be lost, or only the control network. What its ranks did can be seen at the
others: an iteration that begins, or a collective that completes, needs all of them. So the others' progress decides.
"""

from __future__ import annotations

from collections.abc import Collection

_LONGEST_GAP_S = 2.0
"""A longer time without being asked is one in which this process, or its host, was paused."""


def beat_s(nodes: int) -> float:
    """Seconds between two `Beat`s of a launcher, in a job of ``nodes`` nodes."""
    return min(5.0, max(1.0, nodes / 2000))


def lost_s(nodes: int) -> float:
    """Seconds of silence after which a launcher is lost; the kernel may notice an unreachable host sooner."""
    return 3 * beat_s(nodes) + 2.5


STALLED_S = 15.0
"""Time without progress after which the ranks of a node that is cut off end; silence of a node is no longer excused
after it if only some of the others make progress."""
_PROGRESSING_S = 600.0
"""Silence of a node that is excused while all others make progress."""
FINISHED_S = 300.0
"""Silence of a node that is excused once all nodes that are heard of have finished."""


def stall_s(nodes: int, longest_gap_s: float) -> float:
    """Seconds after which a node makes no progress any more.

    Args:
        nodes: of the cycle; with thousands a node is heard of less often.
        longest_gap_s: from one progress of a node to its next, so far in the cycle.
    """
    return min(STALLED_S, max(5.0, 1.5 * longest_gap_s)) + beat_s(nodes)


def excused_s(nodes: int, going: Collection[bool], *, untold_s: float) -> float:
    """Seconds for which a launcher may be silent before its node counts as lost; or the leader, to a launcher.

    Args:
        nodes: of the cycle.
        going: for each of its nodes that is heard of and hasn't finished, True if it makes progress; empty where
            nothing tells that.
        untold_s: seconds in that case.
    """
    if not any(going):
        return lost_s(nodes) if going else max(lost_s(nodes), untold_s)
    return _PROGRESSING_S if all(going) else max(STALLED_S, lost_s(nodes))


class OwnClock:
    """The time in which this process was awake: while it was paused, no peer was silent.

    ``now_s`` counts seconds from 0, and doesn't go on while the process is stopped or suspended.
    """

    def __init__(self, now_s: float) -> None:
        self.now_s = 0.0
        self.slept_s = -1e9
        """The last time at which no launcher could be answered here: the process was paused, or not yet in charge."""
        self._callers_s = now_s

    def set(self, now_s: float) -> None:
        """Set the time by the caller's clock, which doesn't go back."""
        passed_s, self._callers_s = max(0.0, now_s - self._callers_s), now_s
        self.now_s += min(passed_s, _LONGEST_GAP_S)
        if passed_s > _LONGEST_GAP_S:
            self.slept_s = self.now_s

    def callers_s(self, at_s: float) -> float:
        """A moment of this clock by the caller's: not before now, nor so late that it seems to have been paused."""
        return self._callers_s + min(max(0.0, at_s - self.now_s), _LONGEST_GAP_S / 2)
