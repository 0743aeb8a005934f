"""Whether a job gets on from cycle to cycle, or fails at the same place for ever. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["Advance", "Reached", "furthest"]


class Reached(NamedTuple):
    """How far one cycle got: the iteration that it went on from, and the last one it began; -1 where it had none."""

    first: int
    last: int
    trained: bool = True
    """A rank was through a section or an iteration, or may have been; False: all failed in their start."""
    start: str = ""
    """How the start failed, the same words for the same mistake; empty where another one may well get further."""


@dataclass(frozen=True)
class Advance:
    """How far the job has ever got, and for how many failed cycles in a row it has got no further.

    A cycle gets further if it begins an iteration beyond all before, or goes on from a later one: then a checkpoint
    was saved that none before had.

    ``trained``: some cycle was through its start, or may have been. As long as none was, ``starts`` counts those in a
    row that failed in the same way, ``start``. A job that has trained fails at a start for reasons outside of it, too.
    """

    first: int = -1
    last: int = -1
    stalled: int = 0
    trained: bool = False
    start: str = ""
    starts: int = 0

    def after(self, reached: Reached | None) -> Advance:
        """After one more cycle that failed; None is one of which nothing is known.

        A job that has never reported an iteration isn't checked; a cycle without one is, in a job that had some before.
        """
        trained = self.trained or self.last >= 0 or reached is None or reached.trained
        start = "" if trained or reached is None else reached.start
        starts = 0 if not start else self.starts + 1 if start == self.start else 1
        return replace(self._further(reached), trained=trained, start=start, starts=starts)

    def _further(self, reached: Reached | None) -> Advance:
        if reached is None or (self.last < 0 and reached.last < 0):
            return self
        if reached.last > self.last or reached.first > self.first:
            return Advance(max(self.first, reached.first), max(self.last, reached.last))
        return replace(self, stalled=self.stalled + 1)


def furthest(known: Iterable[Advance]) -> Advance:
    """What is known by the node that knows most: not all nodes need have seen the job's earlier lives."""
    return max(
        known, key=lambda advance: (advance.last, advance.first, advance.stalled, advance.trained), default=Advance()
    )
