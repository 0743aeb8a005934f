"""Between the launcher's machine and the keeper of this node's memory checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from megatron_ft.core.agent import effects
from megatron_ft.core.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.job.rules.messages import StockTaken
from megatron_ft.memory.base.keeper_messages import Prepare, RankBegan
from megatron_ft.memory.launcher.keeper_process import Keeper, KeeperEvent
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.launcher.snapshots_on_node import FromKeeper
from megatron_ft.memory.rules.snapshots import KeeperPort, Kept, OfSnapshots, Restore, Restored, Saved, Settled


class MemoryCheckpoints:
    """One launcher's. ``to_machine`` takes the events for the machine."""

    def __init__(self, keeper: Keeper, files: SnapshotFiles, to_machine: Callable[[FromKeeper], None]) -> None:
        self._keeper = keeper
        self._files = files
        self._to_machine = to_machine
        self._cycle = -1
        self._restoring: set[int] = set()
        """Ranks that haven't restored yet what was chosen for the cycle."""
        self._longest_s = 0.0
        self._trains_without = False

    def prepare(self, cycle: int, ranks: Sequence[int], world: int, restore: Restore | None) -> None:
        """Begin a cycle on this node, before its ranks start."""
        self._cycle, self._restoring = cycle, set() if restore is None else set(ranks)
        self._longest_s, self._trains_without = 0.0, False
        key, path = (None, "") if restore is None else (restore.key, self._files.path_of(restore.files))
        sources = () if restore is None else restore.sources
        self._keeper.prepare(Prepare(cycle, tuple(ranks), world, key, files=path, sources=sources))

    def tell(self, fact: OfSnapshots) -> None:
        """Tell the keeper, and the owner of the files, what the job has decided about a snapshot."""
        self._keeper.tell(fact)
        if isinstance(fact, Settled) and fact.complete is not None:
            self._files.superseded(fact.complete)

    def take_stock(self, way: effects.TerminationMode, then: Callable[[Kept], None]) -> None:
        """Call back with everything that a next cycle can restore here; at once if none can follow, or no keeper runs.

        Ranks that finish or stop have no next cycle: the end of their job waits for no keeper.
        """
        if way is effects.TerminationMode.TERMINATED:
            self._keeper.take_stock(then)
        else:
            then(Kept())

    def hear(self, event: KeeperEvent) -> None:
        """Tell the machine what the keeper's news mean for the node."""
        match event:
            case StockTaken() | KeeperPort() | Saved():
                self._to_machine(event)
            case RankBegan(rank=rank) if rank in self._restoring:
                self._began(event)
            case RestoreFailed(rank=rank) if rank in self._restoring:
                self._restoring.clear()  # what other ranks restore from now on is of no use
                self._to_machine(event)

    def _began(self, event: RankBegan) -> None:
        """Tell of the first rank that has restored, of the first that trains without, and when all have restored."""
        self._restoring.discard(event.rank)
        told = Restored(self._cycle, event.key, is_whole=False, newer_than=event.newer_than)
        if event.seconds is None:
            if not self._trains_without:
                self._trains_without = True
                self._to_machine(replace(told, without=event.rank))
            return
        is_first, self._longest_s = not self._longest_s, max(self._longest_s, event.seconds, 1e-9)
        if not self._restoring and not self._trains_without:
            restored = SnapshotRestored(
                cycle=self._cycle, key=event.key, seconds=self._longest_s, newer_than=event.newer_than
            )
            self._to_machine(restored)
        elif is_first:
            self._to_machine(told)
