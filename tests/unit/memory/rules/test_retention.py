"""Which segments of a rank stay, and whether they fit."""

from __future__ import annotations

import pytest

from megatron_ft.memory.rules.retention import (
    Limit,
    NodeMemory,
    Reserve,
    is_stale,
    outdated,
    refusal,
    refuse_chunk,
    room,
)
from megatron_ft.memory.rules.snapshots import SnapshotKey

GB = 10**9


def key(iteration: int, cycle: int = 0) -> SnapshotKey:
    return SnapshotKey(cycle, 0, iteration)


@pytest.mark.parametrize(
    ("verified", "complete", "dropped"),
    [
        ([], None, []),
        ([5], None, []),
        ([5, 6], None, []),  # whether all ranks have 5 or 6 isn't known yet
        ([5, 6], 5, []),
        ([5, 6], 6, [5]),
        ([4, 5, 6], 6, [4, 5]),
        ([5, 6], 7, []),  # this rank's copy of 7 isn't verified
    ],
)
def test_segment_is_outdated_only_if_older_than_the_complete_one(
    verified: list[int], complete: int | None, dropped: list[int]
) -> None:
    found = outdated([key(each) for each in verified], None if complete is None else key(complete))
    assert found == [key(each) for each in dropped]


@pytest.mark.parametrize(
    ("kept", "restore", "stale"),
    [
        (key(7, 1), None, False),  # of this cycle
        (key(7, 0), None, True),
        (key(7, 0), key(7, 0), False),
        (key(6, 0), key(7, 0), True),
        (key(8, 0), key(7, 0), True),  # of a timeline that this cycle leaves
    ],
)
def test_earlier_cycles_are_stale_but_for_what_is_restored(
    kept: SnapshotKey, restore: SnapshotKey | None, stale: bool
) -> None:
    assert is_stale(kept, 1, restore) is stale


def test_room_is_that_of_the_tightest_limit_less_its_reserve() -> None:
    limits = (
        Limit("memory.max of cgroup /job", 10 * GB, 8 * GB, 2 * GB),
        Limit("memory.max of cgroup /", 50 * GB, 10 * GB, 0),
    )
    found = room(NodeMemory(100 * GB, 60 * GB, limits))
    assert found.free_bytes == 4 * GB - (1 << 30)  # the page cache counts as free; at least 1 GiB is left
    assert found.text == "4 GB left by memory.max of cgroup /job, less a reserve of 1.07 GB"
    assert room(NodeMemory(100 * GB, 60 * GB)).free_bytes == 55 * GB  # 5 %


def test_refusal_says_the_arithmetic() -> None:
    found = refusal({0: Reserve(GB, GB // 2)}, [0, 1, 2, 3], 0, NodeMemory(100 * GB, 15 * GB))
    assert found == (
        "4 ranks need 14 GB (each up to 3 x 1 GB + 0.5 GB of copies); "
        "10 GB are free (15 GB available on the node, less a reserve of 5 GB)"
    )


def test_allocated_memory_is_not_counted_twice() -> None:
    memory = NodeMemory(100 * GB, 6 * GB)  # 1 is free
    assert refusal({0: Reserve(GB, 0)}, [0], 2 * GB, memory) == ""
    assert refusal({0: Reserve(GB, 0)}, [0], 1 * GB, memory) != ""


def test_chunk_is_refused_under_pressure() -> None:
    assert refuse_chunk(GB, NodeMemory(100 * GB, 6 * GB)) == ""
    assert "0.9 GB are free" in refuse_chunk(GB, NodeMemory(100 * GB, 59 * GB // 10))
