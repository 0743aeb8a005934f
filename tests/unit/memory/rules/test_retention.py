"""Which segments of a rank stay, and whether they fit."""

from __future__ import annotations

from megatron_ft.memory.rules.retention import (
    BeginSegment,
    Limit,
    refusal,
    room,
)

GB = 10**9


def of_node(left_bytes: int) -> list[Limit]:
    return [Limit(left_bytes, 100 * GB, "available on the node")]


def test_room_is_that_of_the_tightest_limit_less_its_reserve() -> None:
    limits = (
        Limit(4 * GB, 10 * GB, "left by memory.max of cgroup /job"),
        Limit(40 * GB, 50 * GB, "left by memory.max of cgroup /"),
    )
    free_bytes, text = room([*of_node(60 * GB), *limits])
    assert free_bytes == 4 * GB - (1 << 30)  # at least 1 GiB is left
    assert text == "4 GB left by memory.max of cgroup /job, less a reserve of 1.07 GB"
    assert room(of_node(60 * GB))[0] == 55 * GB  # 5 %


def test_refusal_says_the_arithmetic() -> None:
    found = refusal({0: BeginSegment(GB, GB // 2)}, [0, 1, 2, 3], 0, of_node(15 * GB))
    assert found == (
        "4 ranks need 14 GB (each up to 3 x 1 GB + 0.5 GB of copies); "
        "10 GB are free (15 GB available on the node, less a reserve of 5 GB)"
    )


def test_allocated_memory_is_not_counted_twice() -> None:
    memory = of_node(6 * GB)  # 1 is free
    assert refusal({0: BeginSegment(GB, 0)}, [0], 2 * GB, memory) == ""
    assert refusal({0: BeginSegment(GB, 0)}, [0], 1 * GB, memory) != ""
