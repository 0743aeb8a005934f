"""A state that is restored in place, or not at all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.segment_layout import Layout, encode
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.ipc.memory import segment
from megatron_ft.rank.memory.restoring import fill_from
from megatron_ft.rank.memory.snapshot import GivenUpError, Snapshot
from megatron_ft.rank.memory.staging import Staging
from megatron_ft.rank.memory.tensors import gather
from tests.memory.flips import HASHER

KEY = SnapshotKey(0, 7)


def saved(state: dict[Any, Any]) -> int:
    """A sealed segment with that state."""
    gathered = gather(state)
    fd = segment.create()
    entries = []
    for source in Staging().copy_now(gathered.sources):
        data = source.tensor.numpy().tobytes()
        hasher = HASHER()
        hasher.update(data)
        segment.write(fd, memoryview(data), source.entry.offset)
        entries.append(source.entry.__class__(**{**_fields(source.entry), "digest": hasher.hexdigest()}))
    raw = encode(Layout(KEY, 0, 1, tuple(entries), gathered.values))
    segment.seal(fd, segment.write_end(fd, raw, gathered.data_bytes, HASHER))
    return fd


def _fields(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def restore(fd: int, state: dict[Any, Any]) -> None:
    try:
        fill_from(fd, KEY, 0, 1, state, HASHER)
    finally:
        os.close(fd)


def test_tensors_are_filled_in_place_and_values_replaced() -> None:
    state: dict[Any, Any] = {
        "w": torch.arange(6.0).reshape(2, 3),
        "numbers": [1, (2.5, None)],
        0: {"flag": True, "more": torch.tensor(3, dtype=torch.int64)},
    }
    fd = saved(state)
    weight, numbers = torch.zeros(2, 3), [0, (0.0, "old")]
    target: dict[Any, Any] = {"w": weight, "numbers": numbers, 0: {"flag": False, "more": torch.tensor(0)}}
    restore(fd, target)
    assert torch.equal(weight, state["w"])
    assert target["w"] is weight
    assert target["numbers"] is numbers
    assert numbers == [1, (2.5, None)]
    assert target[0]["flag"] is True
    assert target[0]["more"].item() == 3


def test_every_dtype_and_layout_survives_bit_by_bit() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    state = {
        "bf16": bits.view(torch.bfloat16).clone(),
        "f8": bits.view(torch.float8_e4m3fn).clone(),
        "bool": bits > 100,
        "complex": torch.complex(torch.ones(3), torch.zeros(3)).conj(),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
    }
    fd = saved(state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target["transposed"] = torch.zeros(2, 3).t()
    restore(fd, target)
    for name, tensor in state.items():
        found, wanted = (each.resolve_conj().contiguous().reshape(-1) for each in (target[name], tensor))
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), name


def test_tensor_that_the_caller_lacks_is_created() -> None:
    fd = saved({"optimizer": {"state": {0: {"exp_avg": torch.ones(2), "step": 3}}, "groups": [{"lr": 0.1}]}})
    target: dict[Any, Any] = {"optimizer": {"state": {}, "groups": [{"lr": 1.0}]}}
    restore(fd, target)
    assert target["optimizer"]["state"][0]["exp_avg"].tolist() == [1.0, 1.0]
    assert target["optimizer"]["groups"] == [{"lr": 0.1}]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"w": torch.zeros(3), "n": 0},
            r"state\['w'\] is float32 of shape \[3\], but float32 of shape \[2\] was saved",
        ),
        ({"w": torch.zeros(2, dtype=torch.float64), "n": 0}, "float64"),
        ({"w": torch.zeros(2), "n": 0, "more": 1}, r"state\['more'\] was not saved"),
        ({"w": torch.zeros(2), "n": torch.zeros(1)}, r"state\['n'\] is a tensor, but int was saved"),
        ({"w": 3, "n": 0}, r"state\['w'\] is of type int, but a tensor was saved"),
        ({"w": torch.zeros(2), "n": [torch.zeros(1)]}, "another structure"),
    ],
)
def test_state_of_another_structure_is_refused_and_untouched(target: dict[Any, Any], message: str) -> None:
    fd = saved({"w": torch.ones(2), "n": 5})
    with pytest.raises(SnapshotError, match=message):
        restore(fd, target)
    assert not (isinstance(target["w"], torch.Tensor) and target["w"].any())


@pytest.mark.parametrize(("key", "rank", "world"), [(SnapshotKey(1, 7), 0, 1), (KEY, 1, 2), (KEY, 0, 2)])
def test_segment_of_another_place_is_refused(key: SnapshotKey, rank: int, world: int) -> None:
    fd, target = saved({"w": torch.ones(2)}), {"w": torch.zeros(2)}
    with pytest.raises(SnapshotError, match="the segment is of rank 0 of 1, iteration 7"):
        fill_from(fd, key, rank, world, target, HASHER)
    assert not target["w"].any()
    os.close(fd)


def test_snapshot_that_is_given_up_is_never_committed() -> None:
    from megatron_ft.rank.base.agreement import RankInfo

    gathered = gather({"w": torch.ones(2)})
    made = Snapshot(7, RankInfo(0, 0, "", 1), gathered, later=gathered.sources, copied=[], event=None, bytes_later=8)
    assert made.give_up()
    fd = segment.create()
    with pytest.raises(GivenUpError):
        made._fill(fd, HASHER)
    os.close(fd)


def test_tensor_changed_while_it_was_read_makes_no_snapshot() -> None:
    from megatron_ft.rank.base.agreement import RankInfo

    tensor = torch.ones(2)
    gathered = gather({"w": tensor})
    made = Snapshot(7, RankInfo(0, 0, "", 1), gathered, later=gathered.sources, copied=[], event=None, bytes_later=8)
    tensor.add_(1)
    fd = segment.create()
    with pytest.raises(SnapshotError, match=r"state\['w'\] was changed outside the optimizer's step"):
        made._fill(fd, HASHER)
    assert not made.give_up()  # it was read: nothing more is read from now on
    os.close(fd)
