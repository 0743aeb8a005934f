"""Which snapshots of the running cycle all nodes have, and whether all have restored one. Pure."""

from __future__ import annotations

from collections import Counter

from megatron_ft.memory.rules.snapshots import Restored, Settled, SnapshotKey


class CompleteSnapshots:
    """Complete snapshots of one cycle. A message of a node costs the same in a job of any size.

    A node holds what it has saved until that is settled.
    """

    def __init__(self, cycle: int, nodes: int, restored: SnapshotKey | None = None) -> None:
        """``restored``: the snapshot that was chosen for the cycle, which all nodes have."""
        self._cycle = cycle
        self._nodes = nodes
        self._newest: dict[int, SnapshotKey] = {}
        """The last one that a node has saved, by place."""
        self._at: Counter[SnapshotKey] = Counter()
        """Number of nodes by their newest one."""
        self._have: Counter[SnapshotKey] = Counter()
        """Number of nodes that hold it, of those that aren't settled."""
        self._settled: Settled | None = None
        self._chosen = self._complete = restored
        self._restored: set[int] = set()
        """Places of nodes all of whose ranks have restored it."""
        self.is_read = False
        """A rank has restored it."""
        self.without: tuple[int, int] | None = None
        """Place and rank of the first one that began without it."""

    @property
    def has_complete(self) -> bool:
        """All nodes have one of this cycle."""
        return self._complete is not None and self._complete.cycle == self._cycle

    def saved(self, place: int, key: SnapshotKey) -> Settled | None:
        """Note that the node at that place holds a snapshot. Return what all nodes are to be told."""
        before = self._newest.get(place)
        if key.cycle != self._cycle or (before is not None and key <= before):
            return None
        self._newest[place] = key
        self._at.update([key])
        self._at.subtract([] if before is None else [before])
        self._at = +self._at  # without those of no node
        if self._settled is None or key > self._settled.key:
            self._have[key] += 1
        oldest = min(self._at)
        if len(self._newest) < self._nodes or all(each > oldest for each in self._have):
            return None
        # all nodes have it, or one of them has passed over it
        if self._have[oldest] == self._nodes:
            self._complete = oldest
        self._have = Counter({each: count for each, count in self._have.items() if each > oldest})
        self._settled = Settled(oldest, self._complete)
        return self._settled

    def missed(self, waiting: tuple[SnapshotKey, ...]) -> Settled | None:
        """Return the answer for a node that has ``waiting`` snapshots, and may have missed it."""
        is_missed = self._settled is not None and any(key <= self._settled.key for key in waiting)
        return self._settled if is_missed else None

    def restored(self, place: int, restored: Restored) -> bool:
        """Note what ranks of the node at that place do with the chosen snapshot. Return True if now all have it."""
        if (restored.cycle, restored.key) != (self._cycle, self._chosen) or place in self._restored:
            return False
        if restored.without is not None:
            self.without = self.without or (place, restored.without)
            return False
        self.is_read = True
        if restored.is_whole:
            self._restored.add(place)
        return len(self._restored) == self._nodes
