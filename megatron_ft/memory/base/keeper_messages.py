"""Messages of a node's keeper: with ranks, with its launcher, and with keepers of other nodes. Segments between keepers
are plain bytes.
"""

from __future__ import annotations

from megatron_ft.link.base.codec import Count, Cycle, Int, Message, PartMessage, Rank, Seconds, Vocabulary, WorldSize
from megatron_ft.link.facts.launcher import RestoreFailed
from megatron_ft.memory.rules.retention import BeginSegment
from megatron_ft.memory.rules.snapshots import CopySource, CopyTo, KeeperPort, Kept, Saved, Settled, SnapshotKey

# -- from a rank: `Granted` or `NotKept` answers all but `RankBegan` ---------------------------------------------------


class KeeperHello(Message, frozen=True):
    """A rank connects."""

    cycle: Cycle
    rank: Rank


class CommitSegment(Message, frozen=True):
    """The segment is written up to ``nbytes``."""

    key: SnapshotKey
    nbytes: Count


class Fetch(Message, frozen=True):
    """Ask for a rank's verified segment of a snapshot. ``rank``: only keepers ask for others than their own."""

    key: SnapshotKey
    rank: Rank = 0


class RankBegan(PartMessage, frozen=True):
    """The rank begins to train with the snapshot that was chosen for its cycle, or without it.

    Args:
        seconds: time it took to restore it, and to compare it with its digests; None: the rank begins without it.
        newer_than: iteration of the checkpoint that the script has on disk; None: it gave none.
        rank: set by the keeper.
    """

    key: SnapshotKey
    seconds: Seconds | None = None
    newer_than: Int | None = None
    rank: Rank = 0


RankToKeeper = KeeperHello | BeginSegment | CommitSegment | Fetch | RankBegan | RestoreFailed
RANK_TO_KEEPER: Vocabulary[RankToKeeper] = Vocabulary(RankToKeeper)


# -- to a rank ----------------------------------------------------------------------------------------------------


class Granted(Message, frozen=True):
    """The request is done: with a descriptor if it was for a segment, after all digests are compared if it commits one.

    ``pickle_key``: in the answer to a hello, as in `Prepare`; ``nbytes``: of the segment that follows, for a keeper of
    another node, in frames of `PIECE_BYTES`.
    """

    pickle_key: str = ""
    nbytes: Count = 0


class NotKept(Message, frozen=True):
    """The request is refused, and why."""

    why: str


KeeperToRank = Granted | NotKept
KEEPER_TO_RANK: Vocabulary[KeeperToRank] = Vocabulary(KeeperToRank)


# -- from the launcher --------------------------------------------------------------------------------------------


class Prepare(Message, frozen=True):
    """A cycle is about to start on this node. Segments of earlier cycles go, except those of ``restore``.

    ``ranks``: global ranks of this node; ``world``: number of ranks of the job; ``restore``: None for none; ``files``:
    directory of the files of ``restore``, if it was left by an earlier life; ``sources``: keepers that have segments of
    ``restore`` which this node hasn't; ``pickle_key``: hexadecimal, for the MAC of what ranks pickle into snapshots.
    ``copies_key``: hexadecimal, by which keepers of the job prove that they are; empty: no other node keeps copies;
    ``copies_bytes_per_s``: most that this keeper sends; ``port``: where the keeper before this one took copies, or 0.
    """

    cycle: Cycle
    ranks: tuple[Rank, ...]
    world: WorldSize
    restore: SnapshotKey | None = None
    pickle_key: str = ""
    copies_key: str = ""
    copies_bytes_per_s: Count = 0
    port: Count = 0
    files: str = ""
    sources: tuple[CopySource, ...] = ()


class TakeStock(Message, frozen=True):
    """Ask for all verified segments, once those that were committed are verified. The answer is `Kept`.

    ``within_s``: then those that are verified by that time, and all in a second answer; None: however long it takes.
    """

    within_s: Seconds | None = None


class SealedSegment(Message, frozen=True):
    """The attached descriptor is that of a sealed segment: the launcher keeps it for a keeper that replaces this one.

    From the launcher to that keeper: ``key`` isn't believed before the segment is verified.
    """

    rank: Rank
    key: SnapshotKey


class DropSegment(Message, frozen=True):
    """Close the descriptor of the launcher, which answers with the same message once it has."""

    rank: Rank
    key: SnapshotKey


LauncherToKeeper = Prepare | Settled | CopyTo | TakeStock | SealedSegment | DropSegment
LAUNCHER_TO_KEEPER: Vocabulary[LauncherToKeeper] = Vocabulary(LauncherToKeeper)


# -- to the launcher ----------------------------------------------------------------------------------------------


class Says(Message, frozen=True):
    """Line for the user."""

    text: str


KeeperToLauncher = SealedSegment | DropSegment | KeeperPort | Saved | Kept | RankBegan | RestoreFailed | Says
KEEPER_TO_LAUNCHER: Vocabulary[KeeperToLauncher] = Vocabulary(KeeperToLauncher)


# -- between the keepers of two nodes -----------------------------------------------------------------------------

PIECE_BYTES = 4 << 20


class Offer(Message, frozen=True):
    """A snapshot of which the other keeper may keep a copy. It asks for each rank's segment (`Fetch`), and then says
    that all are verified (`Granted`), or why not (`NotKept`).

    Args:
        world: number of ranks of the job.
        complete: newest snapshot that all ranks of the job have, as far as the node that offers has been told: of this
            one the copy stays until the one that is offered is complete, too.
    """

    key: SnapshotKey
    ranks: tuple[Rank, ...]
    world: WorldSize
    complete: SnapshotKey | None = None


BetweenKeepers = Offer | Fetch | Granted | NotKept
BETWEEN_KEEPERS: Vocabulary[BetweenKeepers] = Vocabulary(BetweenKeepers)
