"""Managers of local checkpoints: what callers of nvidia-resiliency-ext's rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.local_checkpoints import (
    AsyncRequest,
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
    LocalCheckpointManager,
    SameMachineReplicationException,
    is_loaded,
)
from megatron_ft.integrations.replication import GroupWrapper, LazyCliqueReplicationStrategy
from megatron_ft.integrations.tensor_aware import TensorAwareStateDict
from megatron_ft.memory.rank import objects, saving
from megatron_ft.memory.rank.keeper_connection import KeeperConnection
from megatron_ft.memory.rules.snapshots import SnapshotKey
from tests.support.keepers import RealKeeper, keeper

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
        self.moves.append("to the CPU")

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.moves.append("back")


class InDict(BaseCheckpointManager):
    """Keeps its checkpoints in a dict."""

    def __init__(self) -> None:
        super().__init__("s")
        self.kept: dict[CkptID, TensorAwareStateDict] = {}
        self.fails = False
        self.cleaned: list[tuple[str, int]] = []

    def _my_ckpt_ids(self) -> list[CkptID]:
        return list(self.kept)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        return self.kept[ckpt_id]

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        if not self.fails:
            self.kept[ckpt_id] = state_dict

    def _cleanup(self, iteration: int) -> None:
        self.cleaned.append(("older", iteration))

    def _cleanup_failed_save(self, iteration: int) -> None:
        self.cleaned.append(("failed", iteration))


@pytest.mark.parametrize("is_async", [False, True])
def test_manager_saves_where_its_methods_say(is_async: bool) -> None:
    manager, state = InDict(), Whole(1.0)
    request = manager.save(state, 5, is_async=is_async)
    assert (request is not None) is is_async
    if request is not None:
        assert not manager.kept
        request.execute_sync()
    assert manager.cleaned == [("older", 5)]
    assert manager.find_latest() == 5
    assert not is_loaded()
    assert manager.load() == (state, (5, 0, "s"))
    assert is_loaded()
    assert state.moves == ["to the CPU", "back"]
    with pytest.raises(AssertionError, match="isn't newer"):
        manager.save(state, 5)


def test_save_that_did_not_reach_all_ranks_is_an_error_and_cleaned_up() -> None:
    manager = InDict()
    manager.fails = True
    with pytest.raises(CheckpointingException, match="iteration 5 isn't saved"):
        manager.save(Whole(1.0), 5)
    assert manager.cleaned == [("failed", 5)]
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()
    with pytest.raises(CheckpointingException, match="negative"):
        manager._ckpt_id(-2)


@pytest.mark.parametrize(
    ("other", "expected"),
    [({5, 10}, 10), ({5}, 5), (set(), -1)],
)
def test_latest_is_what_all_ranks_have(monkeypatch: pytest.MonkeyPatch, other: set[int], expected: int) -> None:
    manager = InDict()
    manager.kept = {(iteration, rank, "s"): Whole(1.0) for iteration, rank in [(5, 0), (10, 0), (20, 1)]}
    monkeypatch.setattr(GroupWrapper, "all_gather_object", lambda _, mine: [mine, other])
    assert manager.find_latest() == expected


def test_request_has_the_fields_and_methods_of_a_queue() -> None:
    request = AsyncRequest(None, (), [])
    called: list[int] = []
    request.add_finalize_fn(lambda: called.append(1))
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)
    frozen._replace(call_idx=3).execute_sync()
    assert called == [1]
    assert str(SameMachineReplicationException((1, 0, ""))).startswith("checkpoint (1, 0, '') is on this machine")


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
    assert manager.find_latest() == 10
    found, ckpt_id = manager.load()
    assert isinstance(found, Whole)
    assert found.tensor.tolist() == [3.0, 3.0]
    assert found.moves == ["back"]
    assert ckpt_id == (10, 0, "")
    assert not (tmp_path / "root").exists()
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
