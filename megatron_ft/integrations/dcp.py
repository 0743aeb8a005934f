"""Memory checkpoints through torch's distributed checkpoint.

    dcp.save(state_dict, storage_writer=MemoryWriter(iteration))
    reader = MemoryReader.newest()
    if reader is not None:
        dcp.load(state_dict, storage_reader=reader)

Each rank keeps all shards that it has, replicated ones too, and loads only its own: the sharding must be the same.
Beside what torch's ``save`` and ``load`` gather themselves, only `MemoryReader.newest` is a collective.
"""

from __future__ import annotations

import io
import os
from typing import Any

from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.local_checkpoints import newest_of_all_ranks
from megatron_ft.memory.rank import objects
from megatron_ft.memory.rules.snapshots import SnapshotKey

__all__ = ["MemoryReader", "MemoryWriter"]

_LABEL = "torch.distributed.checkpoint"


class _InMemory:
    """Methods of torch's storages that have nothing to do without paths."""

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        pass

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        return False  # a path is for files


class MemoryWriter(_InMemory, StorageWriter):
    """Saves the state after ``iteration`` completed iterations, as `memory_checkpoint.save` does."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._plan = SavePlan([])

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._plan = plan  # the global one leaves to one rank what several have
        return plan

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Begin to save.

        Raises:
            SnapshotError: the state can't be kept.
        """
        shards = {}
        for item in self._plan.items:
            data = planner.resolve_data(item)
            shards[item.index] = data.getvalue() if isinstance(data, io.BytesIO) else data
        _, metadata = create_default_global_save_plan([self._plan], rewrite_index_hints=False)  # of this rank's shards
        objects.save(self._iteration, (metadata, shards), _LABEL)
        return _done([WriteResult(item.index, 0, None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


class MemoryReader(_InMemory, StorageReader):
    """Reader of one snapshot. ``iteration``: of its state."""

    def __init__(self, key: SnapshotKey) -> None:
        self.iteration = key.iteration
        self._key = key
        self._content: tuple[Metadata, dict[MetadataIndex, Any]] | None = None

    @classmethod
    def newest(cls) -> MemoryReader | None:
        """Return a reader of the newest snapshot that all ranks can load, None if there is none. A collective."""
        found = objects.available(_LABEL)
        newest = newest_of_all_ranks(found)
        return None if newest == -1 else cls(found[newest])

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of this rank's shards.

        Raises:
            SnapshotError: they can't be had.
        """
        if self._content is None:
            self._content = objects.load(self._key, _LABEL)
        return self._content[0]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the shards of the caller's state.

        Raises:
            SnapshotError: its sharding isn't that of the snapshot.
        """
        assert self._content is not None
        shards = self._content[1]
        for each in create_default_local_save_plan(planner.state_dict, is_coordinator=True).items:
            if each.tensor_data is not None:
                saved = shards.get(each.index)
                if saved is None or saved.shape != each.tensor_data.chunk.sizes:
                    raise SnapshotError(f"{each.index.fqn} has other shards on this rank than were saved")
        for item in plan.items:
            saved = shards[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(saved))
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(saved, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        return _done(None)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
