"""Facts that keepers, launchers and the coordinator exchange about memory checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from megatron_ft.link.base.codec import (
    Count,
    Cycle,
    Fact,
    Int,
    Message,
    PartMessage,
    Parts,
    PartState,
    Rank,
    Seconds,
    WorldSize,
)
from megatron_ft.link.base.launcher_part import PartEvent

EARLIER_LIFE = -1
"""In place of a cycle: the snapshot was written by an earlier life of the job, and is in files."""
_WrittenIn = Annotated[int, Meta(ge=EARLIER_LIFE, le=2**62, description="cycle, -1 for an earlier life")]


class SnapshotKey(Fact, frozen=True, order=True):
    """Name of a snapshot; the greatest one is the newest. Two of one iteration may have different states.

    Args:
        cycle: in which it was written; `EARLIER_LIFE` for one that this life has found in files.
        era: number of times that training has gone back within the cycle.
        iteration: steps completed.
    """

    cycle: _WrittenIn
    era: Count
    iteration: Count


class SavedFiles(Message, frozen=True):
    """Snapshot in files that an earlier life has left, of all ranks.

    ``name``: of their directory; ``age_s``: time since they were written.
    """

    name: str
    iteration: Count
    world: WorldSize
    age_s: Seconds = 0.0

    @property
    def restore(self) -> Restore:
        return Restore(SnapshotKey(EARLIER_LIFE, 0, self.iteration), files=self.name, age_s=self.age_s)


class KeptSnapshot(Message, frozen=True):
    """Verified segments of one snapshot on one node. ``ranks``: global ranks; ``world``: number of ranks of the job."""

    key: SnapshotKey
    world: WorldSize
    ranks: tuple[Rank, ...]


class Kept(PartState, frozen=True):
    """Everything that a node's keeper can restore, copies of other nodes' snapshots included. Without a keeper: empty.

    Args:
        local_ranks: number of ranks that the node runs; 0 if it keeps no memory checkpoints (any more).
        files: what the node has found in the job's directory for snapshots; one node looks.
        reads_files: the node can read that directory.
        port: where the keeper serves those of other nodes; 0: nowhere.
    """

    snapshots: tuple[KeptSnapshot, ...] = ()
    local_ranks: Count = 0
    files: SavedFiles | None = None
    reads_files: bool = False
    port: Count = 0


@dataclass(frozen=True, slots=True)
class StockTaken(PartEvent):
    """The keeper has another stock than before. ``is_last``: there will be no keeper any more."""

    kept: Kept
    is_last: bool = False


class SnapshotMessage(PartMessage, frozen=True):
    """Base of messages of which a new leader is told."""

    def noted(self, parts: Parts, cycle: int) -> Parts:
        return parts.updated((parts.get(SnapshotStatus) or SnapshotStatus(cycle)).after(self))


class CopySource(Message, frozen=True):
    """Keeper that has the segments of ranks whose own node hasn't. ``address``: host:port."""

    address: str
    ranks: tuple[Rank, ...]


class Restore(PartState, frozen=True):
    """Choice for a cycle.

    Args:
        key: of the snapshot from which all ranks of the cycle go on.
        tries: cycles that restored it before this one, and failed before a new iteration.
        reached: iteration at which the cycle before this one ended; None if unknown.
        files: name of the directory with the snapshot of an earlier life; empty for one of this life.
        age_s: time since those files were written, when they were found.
        sources: where nodes get the segments of ranks that they haven't.
    """

    key: SnapshotKey
    tries: Count = 0
    reached: Int | None = None
    files: str = ""
    age_s: Seconds = 0.0
    sources: tuple[CopySource, ...] = ()

    @property
    def redone(self) -> int | None:
        """Iterations that the job does again; None if unknown."""
        return None if self.reached is None else max(0, self.reached - self.key.iteration)


class Saved(SnapshotMessage, frozen=True):
    """All ranks of this node have a verified snapshot, and so has the node that keeps copies of them, if one does.

    It is kept until it is `Settled`.
    """

    key: SnapshotKey


class Settled(SnapshotMessage, frozen=True):
    """Every node of the cycle has `Saved` this snapshot or a later one: of those up to it only ``complete`` is kept.

    That is the newest one that all nodes have, None if there is none yet. Without this nodes would wait for ever for a
    snapshot that one node has skipped.
    """

    key: SnapshotKey
    complete: SnapshotKey | None


class KeeperPort(SnapshotMessage, frozen=True):
    """The keeper of this node takes copies of other nodes' snapshots at this port."""

    cycle: Cycle
    port: Count


class CopyTo(PartMessage, frozen=True):
    """The keeper at ``address`` takes copies of this node's snapshots."""

    cycle: Cycle
    address: str


class Restored(SnapshotMessage, frozen=True):
    """Ranks of this node have restored their state from memory, and compared it; or one trains without.

    Args:
        is_whole: all of them have; False: one has.
        without: a rank that begins to train without what was chosen for its cycle; None if no rank does.
        newer_than: iteration of the checkpoint that the script has on disk; None if it named none.
    """

    cycle: Int
    key: SnapshotKey
    is_whole: bool = True
    without: Int | None = None
    newer_than: Int | None = None


OfSnapshots = Settled | CopyTo
_MOST_SAVED = 8
"""Snapshots of which a new leader is told; a node has no memory for as many."""


class SnapshotStatus(PartState, frozen=True):
    """Memory checkpoints of a node, for a leader that has just taken over.

    Args:
        complete: the last snapshot of the cycle that all nodes have, as far as this one has been told.
        saved: those that this node has `Saved` and that aren't `Settled`.
        restored: what all ranks of this node have done; None if they haven't restored anything.
        port: where its keeper takes copies in that cycle; 0: nowhere.
    """

    cycle: Int = -1
    complete: SnapshotKey | None = None
    saved: tuple[SnapshotKey, ...] = ()
    restored: Restored | None = None
    port: Int = 0

    def after(self, message: PartMessage) -> SnapshotStatus:
        """Return the status after a message from or to the leader."""
        match message:
            case Settled(key, complete) if key.cycle == self.cycle:
                return replace(self, complete=complete, saved=tuple(each for each in self.saved if each > key))
            case Saved(key) if key.cycle == self.cycle:
                return replace(self, saved=(*self.saved, key)[-_MOST_SAVED:])
            case KeeperPort(cycle, port) if cycle == self.cycle:
                return replace(self, port=port)
            case Restored(cycle, is_whole=True) if cycle == self.cycle:
                return replace(self, restored=message)
        return self
