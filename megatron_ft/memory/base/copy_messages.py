"""Messages between the keepers of two nodes, and the order in which they come. Segments follow as plain bytes.

| the one that connected | the other |
|---|---|
| `Offer` | `Accepted`, or `NotKept` |
| the segment, in frames of `PIECE_BYTES` | `Accepted` once it is verified, or `NotKept` |
| `Want` | `Offer` and the segment, or `NotKept` |
"""

from __future__ import annotations

from megatron_ft.core.codec import Count, Message, Rank, Vocabulary, WorldSize
from megatron_ft.memory.base.keeper_messages import NotKept
from megatron_ft.memory.rules.snapshots import SnapshotKey

PIECE_BYTES = 4 << 20


class Offer(Message, frozen=True):
    """A verified segment of ``nbytes``. ``world``: number of ranks of the job.

    Args:
        complete: newest snapshot that all ranks of the job have, as far as the node that offers has been told: of this
            one the copy stays until the one that is offered is complete, too.
    """

    key: SnapshotKey
    rank: Rank
    world: WorldSize
    nbytes: Count
    complete: SnapshotKey | None = None


class Want(Message, frozen=True):
    """Ask for the verified segment of a rank."""

    key: SnapshotKey
    rank: Rank


class Accepted(Message, frozen=True):
    """The segment may come; or it has come, and is verified."""


BetweenKeepers = Offer | Want | Accepted | NotKept
BETWEEN_KEEPERS: Vocabulary[BetweenKeepers] = Vocabulary(BetweenKeepers)
