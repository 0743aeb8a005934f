"""Which segments of a rank are kept, and whether they fit into the node's memory. Pure.

A rank has at most three segments: the complete one, which all ranks of the job have; one that isn't complete yet; and
the one being written. A verified segment is kept until a newer one is complete, or its place is needed for writing:
a rank that is one snapshot ahead of the others must not drop what they are about to complete. What all ranks of a node
have isn't dropped before the job has decided about it, even if nothing can be written meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_ft.link.base.codec import Count, Message

SEGMENTS = 3
"""Segments per rank, the one being written included."""
COPIES = 2
"""Segments per rank of another node: of the complete snapshot, and of the one that comes."""
_LEAST_RESERVE = 1 << 30
_RESERVE = 0.05


class Limit(NamedTuple):
    """Memory of a node, or of a group of processes: how much is left of how much. ``name``: says of what."""

    left_bytes: int
    of_bytes: int
    name: str


class BeginSegment(Message, frozen=True):
    """A rank asks for a segment to write, and if it wants more than before, for memory for all its snapshots.

    The rank allocates it. ``copies_bytes``: buffers of the rank itself.
    """

    segment_bytes: Count
    copies_bytes: Count = 0

    @property
    def total_bytes(self) -> int:
        return SEGMENTS * self.segment_bytes + self.copies_bytes


def room(memory: Iterable[Limit]) -> tuple[int, str]:
    """Return the bytes that may still be allocated, and how they were found: the tightest of all limits, each with 5 %
    of it, at least 1 GiB, left alone.
    """
    rooms = []
    for left, of, name in memory:
        reserve = max(int(of * _RESERVE), _LEAST_RESERVE)
        rooms.append((left - reserve, f"{gigabytes(left)} {name}, less a reserve of {gigabytes(reserve)}"))
    return min(rooms)


def refusal(
    demands: Mapping[int, BeginSegment],
    ranks: Iterable[int],
    held_bytes: int,
    memory: Iterable[Limit],
    copied_ranks: int = 0,
) -> str:
    """Return why the snapshots of these ranks don't fit, with the arithmetic; empty if they do.

    Args:
        demands: those known, by rank. A rank without one is taken to need as much as the largest.
        held_bytes: part of the demands that is allocated already.
        copied_ranks: ranks of another node of which copies are kept; each is taken to need as much as the largest.
    """
    largest = max(demands.values(), key=lambda demand: demand.total_bytes)
    each = [demands.get(rank, largest) for rank in ranks]
    needed = sum(demand.total_bytes for demand in each) + copied_ranks * COPIES * largest.segment_bytes
    refused = refuse_chunk(needed - held_bytes, memory)
    if not refused:
        return ""
    per_rank = f"{SEGMENTS} x {gigabytes(largest.segment_bytes)} + {gigabytes(largest.copies_bytes)} of copies"
    if copied_ranks:
        per_rank += f"; copies of {copied_ranks} of another node {COPIES} x {gigabytes(largest.segment_bytes)}"
    allocated = f", of which {gigabytes(held_bytes)} are allocated" if held_bytes else ""
    return f"{len(each)} ranks need {gigabytes(needed)} (each up to {per_rank}){allocated}; {refused}"


def refuse_chunk(nbytes: int, memory: Iterable[Limit]) -> str:
    """Return why so many bytes more can't be allocated now; empty if they can."""
    free_bytes, text = room(memory)
    return "" if nbytes <= free_bytes else f"{gigabytes(max(0, free_bytes))} are free ({text})"


def gigabytes(count: int) -> str:
    """Return a number of bytes for a line."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 or count == 0 else f"{count / 1e6:.3g} MB"
