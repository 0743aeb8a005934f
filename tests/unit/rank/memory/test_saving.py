"""Where a rank saves, and that nothing happens without a keeper."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_ft import memory_checkpoint
from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.rank.memory.connection import find_place

RANK = {"RANK": "3", "WORLD_SIZE": "4", "FT_CYCLE": "2"}


def test_without_a_launcher_nothing_is_saved_or_restored(capfd: pytest.CaptureFixture[str]) -> None:
    threads = len(os.listdir("/proc/self/task"))
    state = {"w": torch.ones(2)}
    memory_checkpoint.save(1, state)
    memory_checkpoint.save(2, state)
    memory_checkpoint.wait()
    assert memory_checkpoint.restore(state) is None
    assert len(os.listdir("/proc/self/task")) == threads


def test_place_is_read_from_the_environment() -> None:
    place = find_place({**RANK, "FT_KEEPER_SOCKET": "/run/k", "FT_MEMORY_RESTORE": "1:1207"})
    assert place is not None
    assert (place.path, place.restore) == ("/run/k", SnapshotKey(1, 1207))
    assert (place.info.global_rank, place.info.world_size, place.info.cycle) == (3, 4, 2)
    assert find_place(RANK) is None


def test_empty_choice_is_none() -> None:
    place = find_place({**RANK, "FT_KEEPER_SOCKET": "/run/k", "FT_MEMORY_RESTORE": ""})
    assert place is not None
    assert place.restore is None


@pytest.mark.parametrize("text", ["7", "1:", ":7", "1:x", "1:-7"])
def test_malformed_choice_is_an_error(text: str) -> None:
    with pytest.raises(SnapshotError, match="CYCLE:ITERATION"):
        find_place({**RANK, "FT_KEEPER_SOCKET": "/run/k", "FT_MEMORY_RESTORE": text})


def test_snapshot_that_is_not_newer_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "FT_KEEPER_SOCKET": "/nowhere", "FT_MEMORY_RESTORE": "1:7"}.items():
        monkeypatch.setenv(name, value)
    assert memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=7) is None
    with pytest.raises(SnapshotError, match="no keeper answers at /nowhere"):
        memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=6)


@pytest.mark.parametrize(("iteration", "every"), [(-1, 1), (3, 0)])
def test_numbers_out_of_range_are_mistakes(iteration: int, every: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        memory_checkpoint.save(iteration, {}, every=every)
