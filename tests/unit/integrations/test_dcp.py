"""torch's distributed checkpoint in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.dcp import MemoryReader, MemoryWriter
from megatron_ft.memory.rank import objects
from megatron_ft.memory.rules.snapshots import SnapshotKey
from tests.support.keepers import RealKeeper, keeper, share_with_another_rank

__all__ = ["keeper"]  # fixture


def state(number: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((2, 3), number), "s": torch.tensor(number)},
        "n": int(number),
        "names": ["a", "b"],
    }


@pytest.mark.filterwarnings("ignore")
def test_state_is_loaded_from_memory(keeper: RealKeeper) -> None:
    assert MemoryReader.newest() is None
    dcp.save(state(7.0), storage_writer=MemoryWriter(10), no_dist=True)
    reader = MemoryReader.newest()
    assert reader is not None
    assert reader.iteration == 10
    target = state(0.0)
    weight = target["model"]["w"]
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["n"] == 7
    assert target["names"] == ["a", "b"]
    assert weight.tolist() == [[7.0] * 3] * 2
    assert target["model"]["s"].item() == 7.0


@pytest.mark.parametrize(("other", "iteration"), [({10}, 10), (set(), None)])
def test_reader_is_of_what_all_ranks_have(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch, other: set[int], iteration: int | None
) -> None:
    monkeypatch.setattr(objects, "available", lambda _: {10: SnapshotKey(0, 0, 10), 20: SnapshotKey(0, 0, 20)})
    share_with_another_rank(monkeypatch, other)
    reader = MemoryReader.newest()
    assert (None if reader is None else reader.iteration) == iteration


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_shards_are_loaded_and_other_shards_refused(keeper: RealKeeper, group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    dcp.save({"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}, storage_writer=MemoryWriter(10))
    reader = MemoryReader.newest()
    assert reader is not None
    target = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    dcp.load({"w": target}, storage_reader=reader)
    assert target.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    metadata, shards = objects.load(SnapshotKey(0, 0, 10), "torch.distributed.checkpoint")
    reader._content = metadata, {index: data[:3] for index, data in shards.items()}
    with pytest.raises(dcp.CheckpointException, match="other shards") as found:
        dcp.load({"w": target}, storage_reader=reader)
    assert isinstance(found.value.failures[0][0], SnapshotError)
