"""Which snapshot the next cycle goes on from, and when one is bad."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from megatron_ft.memory.rules.choice import (
    CycleEnd,
    Holder,
    choose,
    next_restore,
)
from megatron_ft.memory.rules.lines import restored
from megatron_ft.memory.rules.snapshots import (
    CopySource,
    Kept,
    KeptSnapshot,
    Restore,
    SnapshotKey,
)


def key(iteration: int, cycle: int = 1) -> SnapshotKey:
    return SnapshotKey(cycle, 0, iteration)


def kept(place: int, *keys: SnapshotKey, world: int = 4, local_ranks: int = 2) -> Kept:
    """A node with the segments of its ranks, of each of these snapshots."""
    ranks = tuple(range(place * local_ranks, (place + 1) * local_ranks))
    return Kept(tuple(KeptSnapshot(each, world, ranks) for each in keys), local_ranks)


LAST = CycleEnd(1, restored=Restore(key(5, 0)))


def choose_of(nodes: list[Kept]) -> tuple[Restore | None, str]:
    holders = [Holder(each, f"node-{at}:1" if each.port else "") for at, each in enumerate(nodes)]
    return choose(holders, len(nodes), LAST, None)


@pytest.mark.parametrize(
    ("nodes", "chosen", "reason"),
    [
        ([Kept(), Kept()], None, ""),
        ([kept(0, key(7), key(8)), kept(1, key(7), key(8))], key(8), ""),
        ([kept(0, key(7), key(8)), kept(1, key(7))], key(7), ""),
        ([kept(0, key(7)), kept(1, key(8))], None, "node 1 has no snapshot of rank 2 of iteration 7"),
        ([kept(0, key(7)), Kept()], None, "node 1 keeps no memory checkpoints"),
        ([replace(kept(0, key(7)), local_ranks=0)], None, "node 0 keeps no memory checkpoints"),
        ([kept(0, key(5, 0)), kept(1, key(5, 0))], key(5, 0), ""),
        ([kept(0, key(4, 0)), kept(1, key(4, 0))], None, "no snapshot is of cycle 1"),
        ([kept(0, key(9, 0)), kept(1, key(9, 0))], None, "no snapshot is of cycle 1"),
        (
            [kept(0, key(7), world=8), kept(1, key(7), world=8)],
            None,
            "the snapshot of iteration 7 is of 8 ranks, not 4",
        ),
        ([kept(1, key(7)), kept(0, key(7))], None, "node 0 has no snapshot of rank 0 of iteration 7"),
        ([kept(0, key(7)), kept(1, key(7)), kept(2, key(7))], None, "the snapshot of iteration 7 is of 4 ranks, not 6"),
        ([kept(0, key(7), world=2)], key(7), ""),
        ([kept(0, key(9, 0), key(7)), kept(1, key(9, 0), key(7))], key(7), ""),
    ],
)
def test_newest_snapshot_that_each_node_has_of_its_own_ranks_is_chosen(
    nodes: list[Kept], chosen: SnapshotKey | None, reason: str
) -> None:
    assert choose_of(nodes) == (None if chosen is None else Restore(chosen), reason)


def after(restore: Restore | None, *, failed: bool, **more: object) -> CycleEnd:
    return dataclasses.replace(CycleEnd(2, restore, failed), **more)  # type: ignore[arg-type]


SAME = Restore(key(7), reached=9)
FROM_FILES = Restore(key(7), files="of a life", age_s=100.0)


@pytest.mark.parametrize(
    ("last", "restore", "reason"),
    [
        # the first restore
        (after(None, failed=True, reached=9), SAME, ""),
        (after(None, failed=False), Restore(key(7)), ""),
        (after(None, failed=False, reached=-1), Restore(key(7)), ""),
        (after(Restore(key(3), 1), failed=True, reached=9), SAME, ""),
        # the same one again
        (after(SAME, failed=True, reached=-1), replace(SAME, tries=1), ""),
        (after(FROM_FILES, failed=True, reached=-1), replace(FROM_FILES, tries=1, reached=None), ""),
        (after(FROM_FILES, failed=False, reached=9, advanced=True), replace(FROM_FILES, reached=9), ""),
        (after(SAME, failed=True, reached=11), replace(SAME, tries=1, reached=11), ""),
        (after(SAME, failed=True), replace(SAME, tries=1, reached=None), ""),
        (after(Restore(key(7)), failed=True, reached=7, advanced=True), Restore(key(7), tries=1), ""),
        (after(SAME, failed=False, reached=None), replace(SAME, reached=None), ""),
        (after(replace(SAME, tries=1), failed=False, reached=9), replace(SAME, tries=1), ""),
        # bad
        (
            after(replace(SAME, tries=1), failed=True),
            None,
            "2 cycles that restored iteration 7 failed before a new one",
        ),
        # not bad, because the job got further in between
        (after(replace(SAME, tries=1), failed=True, reached=12, advanced=True), Restore(key(7), reached=12), ""),
        (
            after(None, failed=True, resumes_from_file=True),
            None,
            "Megatron's re-run goes on from the checkpoint that it has saved",
        ),
    ],
)
def test_snapshot_is_restored_until_two_cycles_fail_from_it_before_a_new_iteration(
    last: CycleEnd, restore: Restore | None, reason: str
) -> None:
    assert next_restore((Restore(key(7)), ""), last) == (restore, reason)


@pytest.mark.parametrize(
    ("reached", "line"),
    [
        (None, "restored iteration 7 from memory"),
        (7, "restored iteration 7 from memory, 0 iterations redone"),
        (8, "restored iteration 7 from memory, 1 iteration redone"),
        (6, "restored iteration 7 from memory, 0 iterations redone"),
    ],
)
def test_line_tells_iterations_that_are_redone_if_they_are_known(reached: int | None, line: str) -> None:
    assert restored(Restore(key(7), reached=reached)) == line


def test_two_neighbours_lost_at_once_leave_nothing_to_restore_and_the_reason_names_a_node() -> None:
    """Of four nodes, each with copies of the one before, those at 1 and 2 are lost: the segments of 1 were on both."""

    def having(*ranks: int) -> Kept:
        return Kept((KeptSnapshot(key(7), 8, ranks),), 2, port=1)

    first, newcomer, last = having(0, 1, 6, 7), Kept(local_ranks=2), having(4, 5, 6, 7)
    assert choose_of([first, newcomer, newcomer, last]) == (None, "node 1 has no snapshot of rank 2 of iteration 7")
    chosen = choose_of([first, newcomer, having(2, 3, 4, 5), having(6, 7)])
    assert chosen == (Restore(key(7), sources=(CopySource("node-2:1", (2, 3)),)), "")
