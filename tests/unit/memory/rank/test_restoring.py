"""A state that is restored in place, or not at all."""

from __future__ import annotations

import enum
import math
import os
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_ft.errors import LayoutError, SnapshotError
from megatron_ft.memory.base import segment
from megatron_ft.memory.rank.copying import Mapping, copy_tensors, memory_at, plan_for, why_unfit
from megatron_ft.memory.rank.keeper_connection import Place
from megatron_ft.memory.rank.restoring import fill_from
from megatron_ft.memory.rank.state_tree import take_apart
from megatron_ft.memory.rules.segment_layout import encode_head, encode_rows
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base.agreement import RankInfo
from tests.memory.flips import DIGEST

KEY = SnapshotKey(0, 0, 7)


def place(rank: int = 0, world: int = 1) -> Place:
    return Place("", None, RankInfo(rank, rank, "", 1, world), DIGEST)


def saved(state: dict[Any, Any]) -> int:
    """A sealed segment with that state, written as a rank writes it."""
    try:
        tree, tensors = take_apart(state)
        plan = plan_for(tensors, None)
        head = encode_head(KEY, 0, 1, plan.rows, tree)
    except (OverflowError, UnicodeEncodeError):
        head = encode_head(KEY, 0, 1, plan.rows, take_apart(state, carefully=True)[0])
    fd = segment.create()
    os.ftruncate(fd, plan.data_bytes)
    mapping = Mapping(fd, plan.data_bytes)
    copy_tensors(tensors, plan, mapping)
    digests = [
        DIGEST([memory_at(mapping.address + at, nbytes)]) for at, nbytes in zip(plan.offsets, plan.nbytes, strict=True)
    ]
    mapping.close()
    segment.seal(fd, segment.write_end(fd, head, digests, plan.data_bytes, DIGEST))
    return fd


def restore(fd: int, state: dict[Any, Any]) -> dict[Any, Any]:
    fill_from(fd, place(), KEY, state)
    return state


def test_tensors_are_filled_in_place_and_values_replaced() -> None:
    state: dict[Any, Any] = {
        "w": torch.arange(6.0).reshape(2, 3),
        "numbers": [1, (2.5, None)],
        0: {"flag": True, "more": torch.tensor(3, dtype=torch.int64)},
    }
    weight, numbers = torch.zeros(2, 3), [0, (0.0, "old")]
    target: dict[Any, Any] = {"w": weight, "numbers": numbers, 0: {"flag": False, "more": torch.tensor(0)}}
    restore(saved(state), target)
    assert torch.equal(weight, state["w"])
    assert target["w"] is weight
    assert target["numbers"] is numbers
    assert numbers == [1, (2.5, None)]
    assert target[0]["flag"] is True
    assert target[0]["more"].item() == 3


class Place3(NamedTuple):
    x: int
    y: Any


class Color(enum.IntEnum):
    RED = 3


class Mode(str, enum.Enum):
    FAST = "fast"


BITS = torch.arange(256, dtype=torch.uint8)
TENSORS: dict[str, Any] = {
    **{
        str(dtype): torch.arange(12).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
    },
    **{str(dtype): torch.arange(12).to(dtype) for dtype in (torch.int64, torch.uint16, torch.uint32, torch.uint64)},
    **{str(dtype): torch.linspace(-3, 3, 11).to(dtype) for dtype in (torch.float16, torch.float32, torch.float64)},
    "bf16": BITS.view(torch.bfloat16).clone(),
    "f8 e4m3": BITS.view(torch.float8_e4m3fn).clone(),
    "f8 e5m2": BITS.view(torch.float8_e5m2).clone(),
    "complex": torch.complex(torch.ones(3), torch.arange(3.0)),
    "complex128": torch.complex(torch.ones(3).double(), torch.arange(3.0).double()),
    "conj": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    "neg": torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(30.0)[3::4],
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "expanded twice": torch.tensor(2.5).expand(4, 5),
    "view": torch.arange(100.0)[40:60],
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "needs grad": torch.ones(3, requires_grad=True),
    "inference": torch.inference_mode()(lambda: torch.ones(3))(),
    "large": torch.arange(5 << 20, dtype=torch.int32),
    "large transposed": torch.arange(1 << 20).reshape(1 << 10, 1 << 10).t(),
}
VALUES: dict[str, Any] = {
    "None": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**64), 10**100],
    "many ints": list(range(100_000)),
    "floats": [0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf],
    "nan": [math.nan],
    "strings": ["", "é", "\0", "😀", "a" * 10_000],
    "bytes": b"\x00\xff",
    "nested": {"a": [1, ("b", {"c": (None, [])})], 7: {}},
    "int and str keys": {1: "int", "1": "str"},
    "tuple": (1, (2, 3)),
    "empty": [(), [], {}],
    "Size": torch.Size([2, 3]),
    "namedtuple": Place3(1, [Place3(2, "y")]),
    "namedtuple of tensors": Place3(1, torch.ones(2)),
    "IntEnum": Color.RED,
    "str enum": Mode.FAST,
    "in a list": [Color.RED, np.float64(2.5)],
    **{
        name: getattr(np, name)(3)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{
        name: getattr(np, name)(2.5)
        for name in ("float16", "float32", "float64", "longdouble", "complex64", "complex128")
    },
    "numpy bool": np.bool_(True),
    "OrderedDict": OrderedDict(a=1, b=2),
    "random state": __import__("random").Random(1).getstate(),
    "scheduler": {"last_epoch": 3, "_step_count": 4, "base_lrs": [1e-3], "verbose": False},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "is of type object"),
    "set": ({1}, "is of type set"),
    "function": (len, "is of type builtin_function_or_method"),
    "numpy array": (np.ones(2), "is of type ndarray"),
    "numpy datetime": (np.datetime64("2020-01-01"), "is of type datetime64"),
    "key": ({1.5: 0}, "has a key of type float"),
    "bool key": ({True: 0}, "has a key of type bool"),
    "surrogate": ("\ud83d", "has a string with a lone surrogate"),
    "surrogate in a key": ({"\ud83d\ude00": 1, "😀": 2}, "has a string with a lone surrogate"),
    "long int": (10**5000, "too many digits"),
    "dtype": (torch.float32, "is of type dtype"),
    "sparse": (torch.eye(3).to_sparse(), "sparse_coo tensor"),
    "meta": (torch.ones(3, device="meta"), "on meta"),
    "nested tensor": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    "subclass": (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "is a Mine; give the plain tensor"),
    "deep": (__import__("functools").reduce(lambda inner, _: [inner], range(70), 1), "nested deeper than 64"),
}


def bits_of(tensor: Any) -> Any:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_tensor_of_each_kind_comes_back_bit_by_bit(name: str, is_in_place: bool) -> None:
    tensor = TENSORS[name]
    target = torch.zeros_like(tensor, requires_grad=False)
    if "expanded" in name:
        target = torch.zeros(tensor.shape[0] if name == "expanded" else 1, 1).expand(tensor.shape)
    found = restore(saved({"before": torch.ones(3), "t": tensor}), {"t": target} if is_in_place else {})["t"]
    assert (found is target) == is_in_place
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bits_of(found) == bits_of(tensor)


def test_expanded_tensor_is_not_filled_with_other_values_than_it_can_hold() -> None:
    with pytest.raises(SnapshotError, match="isn't what was restored"):
        restore(saved({"t": torch.arange(6.0).reshape(2, 3)}), {"t": torch.zeros(2, 1).expand(2, 3)})


@pytest.mark.parametrize("name", VALUES)
def test_value_of_each_kind_comes_back(name: str) -> None:
    value = VALUES[name]
    found = restore(saved({"v": value}), {})["v"]
    if name == "OrderedDict":
        value = dict(value)
    assert repr(found) == repr(value)
    assert type(found) is type(value)


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_cannot_be_kept_is_refused_with_its_path(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(SnapshotError, match=r"^state\['v'\]") as raised:
        _, tensors = take_apart({"v": value})
        for tensor in tensors:
            if why := why_unfit(tensor):
                raise SnapshotError(f"state['v'] {why}")
        encode_head(KEY, 0, 1, plan_for(tensors, None).rows, take_apart({"v": value}, carefully=True)[0])
    assert message in str(raised.value)


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
        ({"w": torch.eye(2).to_sparse(), "n": 0}, "sparse"),
    ],
)
def test_state_of_another_structure_is_refused_and_untouched(target: dict[Any, Any], message: str) -> None:
    fd = saved({"w": torch.ones(2), "n": 5})
    with pytest.raises(SnapshotError, match=message):
        restore(fd, target)
    assert not (isinstance(target["w"], torch.Tensor) and target["w"].layout is torch.strided and target["w"].any())


@pytest.mark.parametrize(("key", "rank", "world"), [(SnapshotKey(0, 1, 7), 0, 1), (KEY, 1, 2), (KEY, 0, 2)])
def test_segment_of_another_place_is_refused(key: SnapshotKey, rank: int, world: int) -> None:
    target = {"w": torch.zeros(2)}
    with pytest.raises(SnapshotError, match="isn't this rank's: it is of iteration 7, rank 0 of 1"):
        fill_from(saved({"w": torch.ones(2)}), place(rank, world), key, target)
    assert not target["w"].any()


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {"a": ["tensor", 1]},
        {"a": ["tensor", 0], "b": ["tensor", 0]},
        {"a": ["tensor"]},
        {"a": ["pickle", b"x"]},
        {"a": ["int", "12x"]},
        {"a": ["enum", "os", 3, 4]},
        {"a": ["numpy", "<O8", b"x"]},
        {"a": ["list", 3]},
        {b"key": 1},
        __import__("functools").reduce(lambda inner, _: {"a": inner}, range(80), 1),
    ],
)
def test_malformed_tree_is_refused(tree: Any) -> None:
    fd = segment.create()
    os.ftruncate(fd, 1)
    head = encode_head(KEY, 0, 1, encode_rows([("uint8", [1])]), tree)
    segment.seal(fd, segment.write_end(fd, head, [DIGEST([b"\0"])], 1, DIGEST))
    with pytest.raises(LayoutError):
        restore(fd, {})
