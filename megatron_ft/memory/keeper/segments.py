"""The segments of a node, from their allocation to their end, and what is known of the snapshots of a cycle."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import close_fds
from megatron_ft.memory.base import keeper_messages as m
from megatron_ft.memory.keeper import work
from megatron_ft.memory.rules.retention import BeginSegment
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

    rank: int
    fd: int
    nbytes: int
    state: SegmentState
    key: SnapshotKey | None = None
    world: int = 0


@dataclass(eq=False)
class Cycle:
    """The cycle that was prepared last, with all that is known of it.

    Args:
        complete: newest snapshot that all ranks of the job have.
        saved: newest one that the launcher was told of.
        settled: newest one up to which no other one needs to be kept.
        demands: memory for each rank that has asked for it.
        stock_due_s: time by which the launcher is told the stock, if it has asked.
        loaded: ranks whose segment it has begun to load from a file or another node.
        incomplete: by rank, number of snapshots that it has kept since one was complete.
        said: subjects of lines.
    """

    prepared: m.Prepare
    complete: SnapshotKey | None = None
    saved: SnapshotKey | None = None
    settled: SnapshotKey | None = None
    demands: dict[int, BeginSegment] = field(default_factory=dict)
    stock_due_s: float | None = None
    loaded: set[int] = field(default_factory=set)
    incomplete: Counter[int] = field(default_factory=Counter)
    said: set[str] = field(default_factory=set)


class Segments(list[HeldSegment]):
    """All segments.

    ``tell``: sends the launcher a message with descriptors.
    """

    def __init__(self, reactor: Reactor, tell: Callable[[m.KeeperToLauncher, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._reactor = reactor
        self._tell = tell

    def add(self, rank: int, fd: int, nbytes: int, state: SegmentState, key: SnapshotKey | None = None) -> HeldSegment:
        self.append(held := HeldSegment(rank, fd, nbytes, state, key))
        return held

    def sealed(self, held: HeldSegment) -> None:
        """Have the launcher keep a segment, too. It is verified next."""
        assert held.key is not None
        held.state = SegmentState.SEALED
        self._tell(m.SealedSegment(held.rank, held.key), (held.fd,))

    def received(self, held: HeldSegment, fd: int) -> bool:
        """Take a segment that has come from a file or another node, -1 if none has. Return False if it was dropped."""
        is_wanted = held.state is SegmentState.RECEIVING
        if is_wanted and fd >= 0:
            held.fd, held.nbytes = fd, os.fstat(fd).st_size
            self.sealed(held)
            return True
        close_fds([fd])
        held.state = SegmentState.LEAVING
        self.remove(held)
        return is_wanted

    def drop(self, held: HeldSegment) -> None:
        """Let go of a segment, after the launcher: whichever is last frees the memory, which takes seconds."""
        is_with_launcher, held.state = held.state in (SegmentState.SEALED, SegmentState.VERIFIED), SegmentState.LEAVING
        if is_with_launcher and held.key is not None:
            self._tell(m.DropSegment(held.rank, held.key), ())
        else:
            self.close(held)

    def close(self, held: HeldSegment) -> None:
        """Free a segment in the background. It counts as memory until then."""
        if held.fd >= 0:  # else it is being closed, or its thread sees that it isn't wanted
            work.aside(self._reactor, partial(os.close, held.fd), lambda _: self.remove(held))
            held.fd = -1

    def of(self, rank: int, *states: SegmentState) -> list[HeldSegment]:
        """Return the segments of a rank in any of these states; in all if none is given."""
        return [each for each in self if each.rank == rank and (not states or each.state in states)]

    def verified(self, rank: int) -> dict[SnapshotKey, HeldSegment]:
        return {each.key: each for each in self.of(rank, SegmentState.VERIFIED) if each.key is not None}

    def next_to_verify(self, complete: SnapshotKey | None) -> HeldSegment | None:
        """Return the sealed segment that is verified first: of the complete snapshot, then of the newest one."""
        sealed = [each for each in self if each.state is SegmentState.SEALED]
        return max(sealed, key=lambda each: (each.key == complete, each.key), default=None)

    def stock(self) -> Kept:
        """Return everything that is verified."""
        found: dict[tuple[SnapshotKey, int], set[int]] = {}
        for each in self:
            if each.state is SegmentState.VERIFIED and each.key is not None:
                found.setdefault((each.key, each.world), set()).add(each.rank)
        return Kept(
            tuple(KeptSnapshot(key, world, tuple(sorted(ranks))) for (key, world), ranks in sorted(found.items()))
        )

    def unneeded(
        self, ranks: Collection[int], complete: SnapshotKey | None, settled: SnapshotKey | None
    ) -> Iterator[HeldSegment]:
        """Yield what is older than the snapshot that all ranks have, and what else of ``ranks`` is settled."""
        for each in self[:]:
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
        for each in self[:]:
            is_wanted = each.key is not None and (each.key.cycle >= cycle or each.key == restore)
            is_whole = each.state in (SegmentState.SEALED, SegmentState.VERIFIED)
            if each.state is not SegmentState.LEAVING and not (
                is_wanted and is_whole and (each.rank in local or lends)
            ):
                yield each
