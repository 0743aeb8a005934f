"""Segments of a keeper: what it has, and what a cycle doesn't need."""

from __future__ import annotations

from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.keeper.segments import HeldSegment, Segments, SegmentState
from megatron_ft.memory.rules.snapshots import Kept, KeptSnapshot, SnapshotKey


def add(
    segments: Segments, rank: int, key: SnapshotKey | None, state: SegmentState = SegmentState.VERIFIED
) -> HeldSegment:
    held = segments.add(rank, -1, 100, state, key)
    held.world = 2
    return held


OLD, CHOSEN, LATER = SnapshotKey(0, 0, 5), SnapshotKey(0, 0, 6), SnapshotKey(0, 0, 7)


def test_stock_is_what_is_verified() -> None:
    segments = Segments(Reactor(), lambda *_: None)
    add(segments, 1, CHOSEN)
    add(segments, 0, CHOSEN)
    add(segments, 0, LATER)
    add(segments, 1, LATER, SegmentState.SEALED)
    add(segments, 1, None, SegmentState.WRITING)
    assert segments.stock() == Kept((KeptSnapshot(CHOSEN, 2, (0, 1)), KeptSnapshot(LATER, 2, (0,))))


def test_cycle_keeps_only_what_it_restores() -> None:
    segments = Segments(Reactor(), lambda *_: None)
    kept = [
        add(segments, 0, CHOSEN),
        add(segments, 0, CHOSEN, SegmentState.SEALED),  # adopted from an earlier keeper
    ]
    gone = [
        add(segments, 0, OLD),
        add(segments, 0, LATER),
        add(segments, 0, LATER, SegmentState.SEALED),
        add(segments, 0, SnapshotKey(1, 0, 1), SegmentState.WRITING),
        add(segments, 0, None, SegmentState.RECEIVING),
        add(segments, 1, CHOSEN),  # of a rank that is elsewhere now
    ]
    assert list(segments.stale(1, CHOSEN, [0])) == gone
    assert list(segments.stale(1, CHOSEN, [0], lends=True)) == gone[:-1]
    assert set(segments.stale(1, None, [0])) == {*kept, *gone}
    assert set(segments) == {*kept, *gone}


def test_complete_snapshot_is_verified_first_and_then_the_newest() -> None:
    segments = Segments(Reactor(), lambda *_: None)
    for key in (OLD, CHOSEN, LATER):
        add(segments, 0, key, SegmentState.SEALED)
    order = []
    while (held := segments.next_to_verify(CHOSEN)) is not None:
        order.append(held.key)
        held.state = SegmentState.VERIFIED
    assert order == [CHOSEN, LATER, OLD]
