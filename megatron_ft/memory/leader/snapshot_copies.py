"""Which node keeps copies of which other node's snapshots. Pure."""

from __future__ import annotations

from megatron_ft.memory.rules.snapshots import CopyTo


class SnapshotCopies:
    """One cycle's: each node keeps copies of one other. A message of a node costs the same in a job of any size.

    With segments of nodes copies are in the next segment: what takes a whole segment down leaves its copies.
    """

    def __init__(self, cycle: int, nodes: int, segment: int) -> None:
        self._cycle = cycle
        self._nodes, self._step = nodes, segment if nodes > segment > 0 else 1
        self._addresses: dict[int, str] = {}
        """Addresses of keepers that take copies, by the place of their node."""

    def serves(self, place: int, address: str) -> list[tuple[int, CopyTo]]:
        """Note that the keeper at that place takes copies at ``address``. Return what which nodes are to be told."""
        self._addresses[place] = address
        pairs = (place, (place + self._step) % self._nodes), ((place - self._step) % self._nodes, place)
        here = self._addresses
        return [(at, CopyTo(self._cycle, here[to])) for at, to in pairs if at != to and at in here and to in here]
