"""Messages of a node's keeper: with the ranks that save and restore, and with its launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.core.codec import Count, Cycle, Rank, Seconds, Vocabulary, WorldSize
from megatron_ft.core.facts.launcher import RestoreFailed
from megatron_ft.core.memory.snapshots import Complete, CopySource, CopyTo, Kept, Passed, Saved, SnapshotKey


@dataclass(frozen=True, slots=True)
class JobKnown:
    """What a launcher knows of its job and its ranks use.

    Args:
        pickle_key: hexadecimal, for the MAC of what ranks pickle into their snapshots.
        restarts: that the launcher has seen, in ``ran_s`` seconds.
    """

    pickle_key: str = ""
    restarts: Count = 0
    ran_s: Seconds = 0.0


# -- from a rank --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeeperHello:
    """A rank connects. The answer is `KeeperWelcome` or `NotKept`."""

    cycle: Cycle
    rank: Rank


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for memory for the snapshots of this rank. The answer is `Reserved` or `NotKept`.

    ``copies_bytes``: buffers that the rank itself allocates for them.
    """

    segment_bytes: Count
    copies_bytes: Count


@dataclass(frozen=True, slots=True)
class BeginSegment:
    """Ask for a segment to write. The answer is `Segment`, with its descriptor, or `NotKept`."""

    iteration: Count
    segment_bytes: Count


@dataclass(frozen=True, slots=True)
class CommitSegment:
    """The segment is written up to ``nbytes``. The answer, once it is checked, is `Verified` or `NotKept`."""

    iteration: Count
    nbytes: Count


@dataclass(frozen=True, slots=True)
class Abandon:
    """The segment won't be completed."""

    iteration: Count


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for the rank's verified segment of a snapshot. The answer is `Segment` or `NotKept`."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class RankRestored:
    """The rank's state is that of the snapshot, compared with its digests. ``rank``: set by the keeper."""

    key: SnapshotKey
    seconds: Seconds
    rank: Rank = 0


RankToKeeper = KeeperHello | Reserve | BeginSegment | CommitSegment | Abandon | Fetch | RankRestored | RestoreFailed
RANK_TO_KEEPER: Vocabulary[RankToKeeper] = Vocabulary(RankToKeeper)


# -- to a rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeeperWelcome:
    """The rank is known; requests are answered in their order. ``job``: as in `Prepare`."""

    job: JobKnown = JobKnown()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory is reserved, and is allocated in the background."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The attached descriptor is that of the segment."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The committed segment is sealed, and its digests are those of the tensors."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """The request is refused, and why."""

    why: str


KeeperToRank = KeeperWelcome | Reserved | Segment | Verified | NotKept
KEEPER_TO_RANK: Vocabulary[KeeperToRank] = Vocabulary(KeeperToRank)


# -- from the launcher --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """A cycle is about to start on this node. Segments of earlier cycles go, except those of ``restore``.

    ``ranks``: global ranks of this node; ``world``: number of ranks of the job; ``restore``: None for none; ``files``:
    directory of the files of ``restore``, if it was left by an earlier life; ``sources``: keepers that have segments of
    ``restore`` which this node hasn't.
    """

    cycle: Cycle
    ranks: tuple[Rank, ...]
    world: WorldSize
    restore: SnapshotKey | None = None
    job: JobKnown = JobKnown()
    files: str = ""
    sources: tuple[CopySource, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """The attached descriptor is a listening socket: keep copies of other nodes' snapshots from now on.

    ``key``: hexadecimal, by which keepers of the job prove that they are; ``bytes_per_s``: most that this keeper sends.
    """

    key: str
    bytes_per_s: Count


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """The job's life ends: write the segments of a snapshot as files. The answer is `FilesWritten`.

    ``name``: of the snapshot's directory in ``directory``; ``within_s``: then what isn't written is removed.
    """

    directory: str
    name: str
    key: SnapshotKey
    within_s: Seconds


@dataclass(frozen=True, slots=True)
class TakeStock:
    """Ask for all verified segments, once those that were committed are verified. The answer is `Stock`.

    ``within_s``: then those that are verified by that time; None: however long it takes.
    """

    question: Count
    within_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """The attached descriptor is that of a segment which an earlier keeper of this launcher has sealed.

    ``key``: as that one has said; it isn't believed before the segment is verified.
    """

    segment: Count
    rank: Rank
    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Dropped:
    """The launcher has closed its descriptor."""

    segment: Count


LauncherToKeeper = Prepare | OpenDoor | Complete | Passed | CopyTo | TakeStock | WriteFiles | Adopt | Dropped
LAUNCHER_TO_KEEPER: Vocabulary[LauncherToKeeper] = Vocabulary(LauncherToKeeper)


# -- to the launcher ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """The attached descriptor is that of a sealed segment: keep it for a keeper that replaces this one."""

    segment: Count
    rank: Rank
    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Close the descriptor. The answer is `Dropped`."""

    segment: Count


@dataclass(frozen=True, slots=True)
class Stock:
    """Answer to the `TakeStock` of this number; a second one says what was verified after its time."""

    question: Count
    kept: Kept


@dataclass(frozen=True, slots=True)
class FilesWritten:
    """Answer to `WriteFiles`. ``why``: they are not written because of this; empty if they are, and on the disk."""

    nbytes: Count = 0
    seconds: Seconds = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class KeeperSays:
    """Line for the user."""

    text: str
    NAME: ClassVar[str] = "says"


KeeperToLauncher = Hold | DropSegment | Saved | Stock | FilesWritten | RankRestored | RestoreFailed | KeeperSays
KEEPER_TO_LAUNCHER: Vocabulary[KeeperToLauncher] = Vocabulary(KeeperToLauncher)
