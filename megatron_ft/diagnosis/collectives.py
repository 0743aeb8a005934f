"""Collectives in flight of a rank: as its crash reporter sends them, and in short for a snapshot. Pure."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import force_setattr

from megatron_ft.link.base.codec import Count, Fact, Message
from megatron_ft.link.base.wording import shown

_PEER = re.compile(r"^(?:send|recv) (\d+)\s*(?:->|<-)\s*(\d+)$")
_MOST_RANKS = 1 << 20


if TYPE_CHECKING:
    RankGroup = Sequence[int]
else:

    class RankGroup(ABC):  # noqa: B024 - an annotation, by which the codec finds `from_json`
        """RankGroup of a group: a ``range`` if evenly spaced, which takes no room however large it is, or a tuple."""

        @staticmethod
        def from_json(ranks: Any) -> range | tuple[int, ...]:
            """Raises TypeError, ValueError: the value is malformed."""
            found = range(*ranks["range"]) if isinstance(ranks, Mapping) and "range" in ranks else tuple(ranks)
            ends = (found[0], found[-1]) if found and isinstance(found, range) else found
            if not all(type(each) is int and 0 <= each < _MOST_RANKS for each in ends):
                raise ValueError(shown(ranks))
            return found

    RankGroup.register(range)
    RankGroup.register(tuple)


class Collective(Message, frozen=True, kw_only=True):
    """A collective that a rank has entered and not left, in torch's words.

    Args:
        group: torch's name of its process group, the same on all its ranks; ``description`` is the user's.
        seq: its number in that group, from 1; for a point-to-point operation among those of the pair.
        op: "all_reduce"; for a point-to-point operation "recv 0<-1", with ranks of the group.
        ranks: global ranks of the group, as a ``range`` if evenly spaced, else a tuple.
    """

    group: str
    seq: Count
    op: str
    ranks: RankGroup = ()
    p2p: bool = False
    description: str = ""
    backend: str = ""

    def __post_init__(self) -> None:
        ranks = self.ranks if isinstance(self.ranks, range) and self.ranks else tuple(self.ranks)
        if not isinstance(ranks, range) and len(ranks) > 2:
            spaced = range(ranks[0], ranks[-1] + 1, (ranks[1] - ranks[0]) or 1)
            ranks = spaced if len(spaced) == len(ranks) and all(map(int.__eq__, ranks, spaced)) else ranks
        force_setattr(self, "ranks", ranks)

    @property
    def key(self) -> str:
        """Name of the counter of ``seq``: a group may have one for each of two backends."""
        return f"{self.backend}/{self.group}"

    @property
    def peer(self) -> int | None:
        """Global rank on the other side of a point-to-point operation, if the operation names it."""
        found = _PEER.match(self.op)
        if found is None:
            return None
        index = int(found[2])
        return self.ranks[index] if index < len(self.ranks) else None

    @property
    def name(self) -> str:
        """Name for people: "all_reduce #412 of group tp"."""
        group = (self.description or self.group).lower()
        return f"{self.op} #{self.seq}" + ("" if group in ("", "0", "default_pg") else f" of group {group}")


class Collectives(Fact, frozen=True, kw_only=True):
    """The collectives of all process groups of one rank. A group has the same name on all its ranks.

    Args:
        in_flight: unfinished ones, the earliest first.
        enqueued: "backend/group" -> number of the last collective that this rank has entered.
        completed: "backend/group" -> number of the last finished one (on a GPU, once NCCL's watchdog has seen its end).
        error: reason for missing collectives; empty if there is none.
    """

    in_flight: tuple[Collective, ...] = ()
    enqueued: Mapping[str, Count] = {}
    completed: Mapping[str, Count] = {}
    error: str = ""
