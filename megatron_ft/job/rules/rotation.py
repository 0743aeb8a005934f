"""Ranks that change their GPUs when Megatron's rerun state machine asks for another GPU. Pure.

A process keeps its place on the node: LOCAL_RANK, its GPU, its CPUs. Its RANK changes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Rotation(enum.Enum):
    """Processes that change places in the next cycle; the values appear in messages."""

    NONE = "none"
    RANKS = "ranks"
    """The ranks within each node: what shares a node's fast links, or a rail between nodes, still does."""
    NODES = "nodes"
    """The nodes: all their ranks run on other hosts."""


def rotation_for(*, nodes: int, ranks: int, again: bool) -> Rotation:
    """Return who changes places in a job of so many nodes, with so many ranks on each.

    ``again``: a rank got another place, and took the GPU for the same one. It knows a GPU by the name of the host and
    the number of the device, which may be 0 in each process: another host is another GPU for certain.
    """
    if ranks > 1 and not (again and nodes > 1):
        return Rotation.RANKS
    return Rotation.NODES if nodes > 1 else Rotation.NONE


def rotated(items: Sequence[_T], by: int) -> list[_T]:
    """Return the items with each that many places further to the front; the first ones follow the last."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def rotated_within(items: Sequence[_T], size: int) -> list[_T]:
    """Return the items rotated by one within each group of ``size`` that follow each other; 1 or less: all together."""
    if size <= 1:
        return rotated(items, 1)
    return [each for at in range(0, len(items), size) for each in rotated(items[at : at + size], 1)]
