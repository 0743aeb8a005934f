"""The simplest state dict whose tensors can be taken out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ft.integrations.tensor_aware import BasicTensorAwareStateDict


@pytest.fixture
def basic(monkeypatch: pytest.MonkeyPatch) -> BasicTensorAwareStateDict:
    """Where the CPU passes for CUDA."""
    to = torch.Tensor.to

    def to_cpu(tensor: Any, device: str, **options: Any) -> Any:
        return to(tensor, "cpu").clone()

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "to", to_cpu)
    nested = [torch.tensor([2.0]), {"c": torch.tensor([3, 4])}]
    return BasicTensorAwareStateDict({"a": torch.tensor([1.0]), "n": 5, "b": nested})


def values(found: Any) -> list[Any]:
    return [each.tolist() for each in found]


def test_tensors_are_taken_out_and_put_back_in_their_order(basic: BasicTensorAwareStateDict) -> None:
    before = {**basic.state_dict}
    popped = basic.pop_tensors()
    assert values(popped) == [[1.0], [2.0], [3, 4]]
    assert basic.is_hollow
    assert not isinstance(basic.state_dict["a"], torch.Tensor)
    with pytest.raises(AssertionError, match="taken out"):
        basic.pop_tensors()
    basic.insert_tensors(iter(popped))
    assert not basic.is_hollow
    assert basic.state_dict["a"] is before["a"]
    assert values(basic.tensors) == [[1.0], [2.0], [3, 4]]
    assert basic.state_dict["n"] == 5


def test_new_tensors_have_the_shapes_and_types_of_those_taken_out(basic: BasicTensorAwareStateDict) -> None:
    basic.pop_tensors()
    basic.init_tensors()
    kinds = [(tuple(each.shape), each.dtype) for each in basic.tensors]
    assert kinds == [((1,), torch.float32), ((1,), torch.float32), ((2,), torch.int64)]


def test_move_replaces_tensors_and_leaves_the_originals(basic: BasicTensorAwareStateDict) -> None:
    original = basic.state_dict["b"][1]["c"]
    basic.copy_tensors_to_cpu()
    original.zero_()
    assert values(basic.tensors) == [[1.0], [2.0], [3, 4]]
    basic.restore_tensor_device()
    assert values(basic.tensors) == [[1.0], [2.0], [3, 4]]
