"""Between the launcher's machine and the keeper of this node's memory checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_ft.core.agent import edge
from megatron_ft.core.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.core.job.messages import StockTaken
from megatron_ft.core.memory.snapshots import Kept, Restore, SnapshotKey

_NO_KEEPER = "this node keeps no memory checkpoints any more"


class Keeper(Protocol):
    """Orders to the keeper."""

    def prepare(self, cycle: int, ranks: Sequence[int], world: int, restore: SnapshotKey | None) -> None:
        """Begin a cycle, before its ranks start. Segments newer than ``restore`` go; without it, all."""

    def complete(self, key: SnapshotKey) -> None:
        """Keep this snapshot, and none before it."""

    def release(self, key: SnapshotKey) -> None:
        """Up to this snapshot, what isn't complete needn't be kept."""

    def take_stock(self, then: Callable[[Kept], None]) -> None:
        """Call back with everything that can be restored, in a bounded time."""


class MemoryCheckpoints:
    """One launcher's. ``keeper`` None: nothing is ever saved. ``hear`` takes the events for the machine.

    The owner of the keeper calls ``saved``, ``rank_restored``, ``restore_failed`` and ``stock_changed``.
    """

    def __init__(self, keeper: Keeper | None, hear: Callable[[edge.FromKeeper], None]) -> None:
        self._keeper = keeper
        self._hear = hear
        self._cycle = -1
        self._restoring: set[int] = set()
        """Ranks that haven't restored yet what was chosen for the cycle."""
        self._longest_s = 0.0

    # -- what the machine asks for ------------------------------------------------------------------------------

    def prepare(self, cycle: int, ranks: Sequence[int], world: int, restore: Restore | None) -> None:
        """Begin a cycle on this node, before its ranks start."""
        self._cycle, self._restoring, self._longest_s = cycle, set() if restore is None else set(ranks), 0.0
        if self._keeper is not None:
            self._keeper.prepare(cycle, ranks, world, None if restore is None else restore.key)
        elif restore is not None:
            self.restore_failed(restore.key, _NO_KEEPER, ranks[0])

    def act(self, effect: edge.KeepSnapshot | edge.ReleaseSnapshots) -> None:
        """Carry out an effect of the machine."""
        match effect:
            case edge.KeepSnapshot(key) if self._keeper is not None:
                self._keeper.complete(key)
            case edge.ReleaseSnapshots(key) if self._keeper is not None:
                self._keeper.release(key)

    def take_stock(self, then: Callable[[Kept], None]) -> None:
        """Call back with everything that this node can restore; at once if there is no keeper."""
        if self._keeper is None:
            then(Kept())
        else:
            self._keeper.take_stock(then)

    # -- what the keeper says -----------------------------------------------------------------------------------

    def saved(self, key: SnapshotKey) -> None:
        """All ranks of this node have a verified segment of that snapshot."""
        self._hear(edge.SnapshotSaved(key))

    def rank_restored(self, key: SnapshotKey, seconds: float, rank: int) -> None:
        """A rank has restored its state, and compared it."""
        if rank not in self._restoring:
            return
        self._restoring.discard(rank)
        self._longest_s = max(self._longest_s, seconds)
        if not self._restoring:
            self._hear(SnapshotRestored(cycle=self._cycle, key=key, seconds=self._longest_s))

    def restore_failed(self, key: SnapshotKey, why: str, rank: int) -> None:
        """A rank doesn't have the state that was chosen for its cycle."""
        if rank in self._restoring:
            self._restoring.clear()  # what other ranks restore from now on is of no use
            self._hear(RestoreFailed(rank=rank, cycle=self._cycle, key=key, text=why))

    def stock_changed(self, kept: Kept) -> None:
        """What this node can restore has changed since its ranks ended."""
        self._hear(StockTaken(kept))
