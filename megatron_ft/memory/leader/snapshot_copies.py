"""Which node keeps copies of which other node's snapshots. Pure."""

from __future__ import annotations

from megatron_ft.memory.rules.snapshots import CopyTo


def copy_place(place: int, nodes: int, segment: int) -> int | None:
    """Return the place of the node that keeps copies for this one; None if there is no other node.

    Each node keeps those of one other. With segments of so many nodes it is one of the next segment: what takes a
    segment's nodes down together leaves their copies.
    """
    step = segment if nodes > segment > 0 else 1
    return None if nodes < 2 else (place + step) % nodes


class SnapshotCopies:
    """One cycle's, of so many ``nodes``. A message of a node costs the same in a job of any size."""

    def __init__(self, cycle: int, nodes: int, segment: int) -> None:
        self._cycle = cycle
        self._nodes, self._segment = nodes, segment
        self._addresses: dict[int, str] = {}
        self._sources: dict[int, int] = {}
        """By place of a node that keeps copies, that of the one whose copies they are; of nodes that serve."""

    def serves(self, place: int, address: str) -> list[tuple[int, CopyTo]]:
        """Note that the keeper at that place takes copies at ``address``. Return what which nodes are to be told."""
        target = copy_place(place, self._nodes, self._segment)
        if target is None:
            return []
        self._addresses[place], self._sources[target] = address, place
        told = [(place, target)] if target in self._addresses else []
        if place in self._sources:
            told.append((self._sources[place], place))
        return [(at, CopyTo(self._cycle, self._addresses[to])) for at, to in told]
