"""Managers of local checkpoints: what callers of nvidia-resiliency-ext's rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.local_checkpoints import (
    AsyncRequest,
    CheckpointingException,
    LocalCheckpointManager,
    is_loaded,
)
from megatron_ft.integrations.replication import LazyCliqueReplicationStrategy
from megatron_ft.integrations.tensor_aware import TensorAwareStateDict
from megatron_ft.memory.rank import objects, saving
from megatron_ft.memory.rank.keeper_connection import KeeperConnection
from megatron_ft.memory.rules.snapshots import SnapshotKey
from tests.support.keepers import RealKeeper, keeper, share_with_another_rank

__all__ = ["keeper"]  # fixture


class Whole(TensorAwareStateDict):
    """Has one tensor, and notes where it is moved."""

    def __init__(self, number: float) -> None:
        self.tensor = torch.full((2,), number)
        self.moves: list[str] = []

    def _none(self, *_: Any) -> Any:
        raise NotImplementedError

    pop_tensors = insert_tensors = init_tensors = _none
    tensors = is_hollow = property(_none)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        raise NotImplementedError

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.moves.append("back")


@pytest.mark.parametrize(
    ("other", "expected"),
    [({5, 10}, 10), ({5}, 5), (set(), -1)],
)
def test_latest_is_what_all_ranks_have(monkeypatch: pytest.MonkeyPatch, other: set[int], expected: int) -> None:
    monkeypatch.setattr(objects, "available", lambda _: {each: SnapshotKey(0, 0, each) for each in (5, 10, 20)})
    share_with_another_rank(monkeypatch, other)
    assert LocalCheckpointManager(None).find_latest() == expected


def test_request_has_the_fields_and_methods_of_a_queue() -> None:
    request = AsyncRequest(None, (), [])
    called: list[int] = []
    request.add_finalize_fn(lambda: called.append(1))
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)
    frozen._replace(call_idx=3).execute_sync()
    assert called == [1]


def new_process(monkeypatch: pytest.MonkeyPatch, restore: str) -> None:
    assert saving.running is not None
    saving.running.wait()
    monkeypatch.setattr(saving, "running", None)
    monkeypatch.setattr(KeeperConnection, "pickle_key", "")
    monkeypatch.setenv("FT_MEMORY_RESTORE", restore)


@pytest.mark.parametrize("is_async", [False, True])
def test_local_checkpoint_is_in_memory_and_a_new_process_loads_it(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_async: bool
) -> None:
    manager = LocalCheckpointManager(tmp_path / "root", repl_strategy=LazyCliqueReplicationStrategy(1, 2))
    assert manager.find_latest() == -1
    state = Whole(3.0)
    request = manager.save(state, 10, is_async=is_async)
    assert request == (AsyncRequest(None, (), []) if is_async else None)
    assert state.moves == []
    new_process(monkeypatch, "0:0:10")
    manager = LocalCheckpointManager(tmp_path / "root")
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()
    assert manager.find_latest() == 10
    assert not is_loaded()
    found, ckpt_id = manager.load()
    assert is_loaded()
    assert isinstance(found, Whole)
    assert found.tensor.tolist() == [3.0, 3.0]
    assert found.moves == ["back"]
    assert ckpt_id == (10, 0, "")
    assert not (tmp_path / "root").exists()
    with pytest.raises(AssertionError, match="isn't newer"):
        manager.save(state, 10)
    assert manager.local_ckpt_dir == tmp_path / "root" / "0"


def test_local_checkpoint_that_goes_before_it_is_loaded_is_an_error(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = LocalCheckpointManager(None)
    manager.save(Whole(3.0), 10)
    assert manager.find_latest() == 10

    def gone(key: SnapshotKey, label: str) -> Any:
        raise SnapshotError("it is gone")

    monkeypatch.setattr(objects, "load", gone)
    with pytest.raises(CheckpointingException, match=r"iteration 10 .* it is gone"):
        manager.load()
