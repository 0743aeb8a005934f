"""The segments of a node, from their allocation to their end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from megatron_ft.memory.rules.snapshots import Kept, KeptSnapshot, SnapshotKey


class SegmentState(Enum):
    RECEIVING = "comes from a file or another node"
    WRITING = "of a rank, being allocated and written"
    SEALED = "sealed, being verified"
    VERIFIED = "verified"
    LEAVING = "dropped; the launcher still has it, or it is being closed"


@dataclass(eq=False)
class HeldSegment:
    """One segment. ``key``: None until a rank has written it."""

    number: int
    rank: int
    fd: int
    nbytes: int
    state: SegmentState
    key: SnapshotKey | None = None
    world: int = 0
    is_with_launcher: bool = False


class Segments(dict[int, HeldSegment]):
    """All segments, by number. Numbers are never used twice, by a keeper that replaces this one, either."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def add(self, rank: int, fd: int, nbytes: int, state: SegmentState, number: int | None = None) -> HeldSegment:
        """Add a segment; ``number``: of an adopted one."""
        number = self._next if number is None else number
        self._next = max(self._next, number + 1)
        held = self[number] = HeldSegment(number, rank, fd, nbytes, state)
        return held

    def of(self, rank: int, *states: SegmentState) -> list[HeldSegment]:
        """Return the segments of a rank in any of these states; in all if none is given."""
        return [each for each in self.values() if each.rank == rank and (not states or each.state in states)]

    def verified(self, rank: int) -> dict[SnapshotKey, HeldSegment]:
        return {each.key: each for each in self.of(rank, SegmentState.VERIFIED) if each.key is not None}

    def next_to_verify(self, complete: SnapshotKey | None) -> HeldSegment | None:
        """Return the sealed segment that is verified first: of the complete snapshot, then of the newest one."""
        sealed = [each for each in self.values() if each.state is SegmentState.SEALED]
        return max(sealed, key=lambda each: (each.key == complete, each.key, -each.number), default=None)

    def held_bytes(self) -> int:
        """Bytes that are allocated or about to be, and not given back yet."""
        return sum(each.nbytes for each in self.values())

    def common(self, ranks: Iterable[int]) -> set[SnapshotKey]:
        """Return the snapshots of which all these ranks have a verified segment."""
        found = [set(self.verified(rank)) for rank in ranks]
        return set.intersection(*found) if found else set()

    def stock(self) -> Kept:
        """Return everything that is verified."""
        found: dict[tuple[SnapshotKey, int], set[int]] = {}
        for each in self.values():
            if each.state is SegmentState.VERIFIED and each.key is not None:
                found.setdefault((each.key, each.world), set()).add(each.rank)
        return Kept(
            tuple(KeptSnapshot(key, world, tuple(sorted(ranks))) for (key, world), ranks in sorted(found.items()))
        )

    def unneeded(
        self, ranks: Collection[int], complete: SnapshotKey | None, settled: SnapshotKey | None
    ) -> Iterator[HeldSegment]:
        """Yield what is older than the snapshot that all ranks have, and what else of ``ranks`` is settled."""
        for each in list(self.values()):
            key, is_local = each.key, each.rank in ranks
            if key is None or each.state is SegmentState.LEAVING:
                continue
            if is_local and each.state is not SegmentState.VERIFIED:
                continue
            # without the complete one, this rank's own may be the newest that it can restore
            has_newer = not is_local or complete in self.verified(each.rank)
            is_passed = is_local and settled is not None and key <= settled and key != complete
            if is_passed or (complete is not None and key < complete and has_newer):
                yield each

    def stale(
        self, cycle: int, restore: SnapshotKey | None, ranks: Iterable[int], *, lends: bool = False
    ) -> Iterator[HeldSegment]:
        """Yield what a cycle with these ranks doesn't need: all that isn't sealed, or isn't what it restores.

        ``lends``: other nodes may want segments of ranks that aren't of this node.
        """
        local = set(ranks)
        for each in list(self.values()):
            is_old = each.key is not None and each.key.cycle < cycle and each.key != restore
            unfinished = each.state in (SegmentState.WRITING, SegmentState.RECEIVING)
            is_foreign = each.rank not in local and not lends
            if each.state is not SegmentState.LEAVING and (is_old or unfinished or is_foreign):
                yield each
