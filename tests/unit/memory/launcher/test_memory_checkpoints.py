"""What a keeper says becomes the machine's events, and what the machine asks for reaches the keeper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ft.core.agent import events
from megatron_ft.core.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.job.rules.messages import StockTaken
from megatron_ft.memory.base.keeper_messages import Prepare, RankBegan
from megatron_ft.memory.launcher.memory_checkpoints import MemoryCheckpoints
from megatron_ft.memory.rules.snapshots import (
    Kept,
    KeptSnapshot,
    Restore,
    Restored,
    Saved,
    Settled,
    SnapshotKey,
)

KEY = SnapshotKey(0, 0, 7)
STOCK = Kept((KeptSnapshot(KEY, 2, (4, 5)),))


class Recorder:
    """A keeper that notes its orders."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    def prepare(self, order: Prepare) -> None:
        self.orders.append((order,))

    def tell(self, fact: Settled) -> None:
        self.orders.append((fact,))

    def take_stock(self, then: Callable[[Kept], None], timeout_s: float | None = 10.0) -> None:
        self.orders.append(("take_stock", timeout_s))
        then(STOCK)


class Files:
    """Files that note which snapshot supersedes them."""

    def __init__(self) -> None:
        self.newer: list[SnapshotKey] = []

    def path_of(self, name: str) -> str:
        return f"/snapshots/{name}" if name else ""

    def superseded(self, key: SnapshotKey) -> None:
        self.newer.append(key)


def checkpoints(keeper: Recorder, heard: list[events.FromKeeper], files: Any = None) -> MemoryCheckpoints:
    return MemoryCheckpoints(keeper, files or Files(), heard.append)


@pytest.fixture
def heard() -> list[events.FromKeeper]:
    return []


def test_node_has_restored_when_its_slowest_rank_has(heard: list[events.FromKeeper]) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.prepare(1, [4, 5], 8, Restore(KEY))
    memory.hear(RankBegan(KEY, 0.7, rank=4))
    memory.hear(RankBegan(KEY, 0.7, rank=4))
    first = Restored(1, KEY, is_whole=False)
    assert heard == [first]  # from now on the snapshot counts as read
    memory.hear(RankBegan(KEY, 0.2, 5, rank=5))
    memory.hear(RankBegan(KEY, 0.2, 5, rank=5))
    assert heard == [first, SnapshotRestored(cycle=1, key=KEY, seconds=0.7, newer_than=5)]


def test_rank_that_trains_without_the_snapshot_is_told_of_once_and_the_node_has_not_restored(
    heard: list[events.FromKeeper],
) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.prepare(1, [4, 5, 6], 8, Restore(KEY))
    for rank, seconds in ((4, None), (5, 0.2), (6, None)):
        memory.hear(RankBegan(KEY, seconds, rank=rank))
    assert heard == [Restored(1, KEY, is_whole=False, without=4), Restored(1, KEY, is_whole=False)]


def test_node_has_not_restored_if_one_of_its_ranks_cannot(heard: list[events.FromKeeper]) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.prepare(1, [4, 5], 8, Restore(KEY))
    memory.hear(RestoreFailed(rank=5, cycle=1, key=KEY, text="its digest differs"))
    memory.hear(RankBegan(KEY, 0.7, rank=4))
    assert heard == [RestoreFailed(rank=5, cycle=1, key=KEY, text="its digest differs")]


def test_failure_to_restore_what_was_not_chosen_is_not_told(heard: list[events.FromKeeper]) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.prepare(1, [4, 5], 8, None)
    memory.hear(RestoreFailed(rank=5, cycle=1, key=KEY, text="its digest differs"))
    assert heard == []


def test_loss_of_the_keeper_fails_no_script_that_trains_without(heard: list[events.FromKeeper]) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.prepare(1, [5], 8, Restore(KEY))
    memory.hear(RankBegan(KEY, rank=5))
    memory.hear(RestoreFailed(rank=5, cycle=1, key=KEY, text="this node keeps no memory checkpoints any more"))
    assert heard == [Restored(1, KEY, is_whole=False, without=5)]


def test_snapshots_and_the_stock_are_told(heard: list[events.FromKeeper]) -> None:
    memory = checkpoints(Recorder(), heard)
    memory.hear(Saved(KEY))
    memory.hear(StockTaken(STOCK))
    assert heard == [Saved(KEY), StockTaken(STOCK)]
