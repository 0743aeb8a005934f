"""Objects in memory checkpoints: tensors outside the pickle, and no pickle that isn't this job's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.errors import SnapshotError
from megatron_ft.memory.rank import objects, saving
from megatron_ft.memory.rank.keeper_connection import KeeperConnection
from megatron_ft.memory.rules.snapshots import SnapshotKey
from tests.support.keepers import RealKeeper, keeper

__all__ = ["keeper"]  # fixture

KEY, ABOUT = "k" * 64, "rank 0"


class Evil:
    """Its pickle makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def as_loaded(packed: dict[str, Any]) -> dict[str | int, Any]:
    return {**packed, "tensors": [each.detach().clone() for each in packed["tensors"]]}


def longer(state: dict[str | int, Any]) -> dict[str | int, Any]:
    return {**state, "pickle": torch.cat([state["pickle"], torch.zeros(1, dtype=torch.uint8)])}


def test_object_survives_with_its_tensors_outside_the_pickle() -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    value = {"w": weight, "again": weight, 0: (torch.tensor([1, 2]), {"name"}), "sparse": torch.eye(2).to_sparse()}
    packed = objects.pack(value, KEY, ABOUT)
    assert len(packed["tensors"]) == 4  # the sparse one has two, the parameter is there once
    found = objects.unpack(as_loaded(packed), KEY, ABOUT)
    assert isinstance(found["w"], torch.nn.Parameter)
    assert found["w"].tolist() == found["again"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found[0][0].tolist() == [1, 2]
    assert found[0][1] == {"name"}
    assert found["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("change", "key", "about"),
    [
        (lambda state: {**state, "mac": "0" * 64}, KEY, ABOUT),
        (lambda state: {**state, "mac": None}, KEY, ABOUT),
        (longer, KEY, ABOUT),
        (lambda state: {"tensors": state["tensors"]}, KEY, ABOUT),
        (dict, "x" * 64, ABOUT),
        (dict, "", ABOUT),
        (dict, KEY, "rank 1"),
    ],
)
def test_pickle_that_is_changed_or_of_another_job_or_rank_is_not_read(
    tmp_path: Path, change: Any, key: str, about: str
) -> None:
    state = as_loaded(objects.pack(Evil(tmp_path / "made"), KEY, ABOUT))
    with pytest.raises(SnapshotError, match="MAC"):
        objects.unpack(change(state), key, about)
    assert not (tmp_path / "made").exists()


def test_newest_saved_object_can_be_loaded_and_in_a_new_process_the_chosen_one_under_its_label_only(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = SnapshotKey(0, 0, 20)
    for iteration in (10, 20):
        objects.save(iteration, {"w": torch.full((2,), float(iteration))}, "here")
        saving.saver(_place()).wait()
    assert objects.available("here") == {20: newest}
    assert objects.load(newest, "here")["w"].tolist() == [20.0, 20.0]
    monkeypatch.setattr(saving, "running", None)
    monkeypatch.setenv("FT_MEMORY_RESTORE", "0:0:20")
    assert objects.available("elsewhere") == {}
    assert objects.available("here") == {20: newest}
    assert objects.load(newest, "here")["w"].tolist() == [20.0, 20.0]


def test_object_under_another_key_is_left_out_with_a_line(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KeeperConnection, "pickle_key", "of another job")
    objects.save(10, {"w": torch.ones(2)}, "here")
    assert objects.available("here") == {}
    assert "iteration 10 isn't used: its MAC isn't this job's" in capfd.readouterr().err


def _place() -> Any:
    return objects.usable_place()
