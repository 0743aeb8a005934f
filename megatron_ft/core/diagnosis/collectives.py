"""What a rank tells of its collectives, as its crash reporter sends it and the evidence has it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from megatron_ft.core.codec import Count, Form
from megatron_ft.core.diagnosis.rank_snapshot import Collective, packed, unpacked

__all__ = ["CollectiveInFlight", "Collectives", "NoCollectives", "collectives_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInFlight:
    """One that isn't over, in torch's words.

    Args:
        group: torch's name of its process group; ``description`` is the user's.
        seq: its number in that group; of a point-to-point operation among those of the pair.
        p2p: it is a point-to-point operation.
        sizes: of its tensors, cut off.
    """

    group: str
    description: str
    seq: Count
    op: str
    backend: str
    p2p: bool
    sizes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Those of all process groups of one rank. Groups are named alike on all their ranks.

    Args:
        in_flight: not over yet, the earliest first.
        enqueued: "backend/group" -> number of the last collective that this rank has entered.
        completed: the same of the last that is over (on a GPU, once NCCL's watchdog has seen its kernel end).
        ranks: group -> its global ranks; of groups in flight.
    """

    in_flight: tuple[CollectiveInFlight, ...]
    enqueued: Mapping[str, Count]
    completed: Mapping[str, Count]
    ranks: Mapping[str, Annotated[Sequence[int], Form(unpacked, packed)]]


@dataclass(frozen=True, slots=True)
class NoCollectives:
    """Why nothing is known of them."""

    error: str


def collectives_of(told: Collectives | NoCollectives) -> tuple[Collective, ...]:
    """The collectives in flight, for a note."""
    if isinstance(told, NoCollectives):
        return ()
    return tuple(
        Collective(
            group=each.group,
            seq=each.seq,
            op=each.op,
            ranks=told.ranks.get(each.group, ()),
            p2p=each.p2p,
            description=each.description.lower(),
            backend=each.backend,
        )
        for each in told.in_flight
    )
