"""Nodes that wait for the next round of the rendezvous: for whom a cycle is ended, and who stands by. Pure.

Nodes are known here by whatever the rendezvous knows them by.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Admission", "Waiting"]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Who waits while a cycle runs."""

    returning: frozenset[Hashable] = frozenset()
    """Nodes of that cycle, which have ended their ranks."""
    joining: frozenset[Hashable] = frozenset()
    """Others, for which there is room."""
    spare: frozenset[Hashable] = frozenset()
    """Others, for which there is none: the cycle has as many nodes as it may have."""
    unknown: int = 0
    """So many wait, and the rendezvous doesn't tell who: they may be nodes of the cycle."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which of them a cycle is ended for.

    Args:
        at_once: those for which there is room.
        goes_on_without: whether the cycle goes on without nodes of its own; else it isn't healthy any more when
            one of them waits.
    """

    at_once: bool
    goes_on_without: bool

    def wanted(self, waiting: Waiting) -> int:
        """For so many nodes the cycle is ended."""
        return len(self._wanted(waiting)) + (0 if self._leaves_all_waiting else waiting.unknown)

    def standing_by(self, waiting: Waiting) -> frozenset[Hashable]:
        """The others: they are used at the next restart."""
        return (waiting.returning | waiting.joining | waiting.spare) - self._wanted(waiting)

    @property
    def _leaves_all_waiting(self) -> bool:
        return self.goes_on_without and not self.at_once

    def _wanted(self, waiting: Waiting) -> frozenset[Hashable]:
        if self._leaves_all_waiting:
            return frozenset()
        return waiting.returning | waiting.joining if self.at_once else waiting.returning
