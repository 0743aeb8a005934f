"""Layout of a segment: what is written is read again, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.errors import LayoutError, SnapshotError
from megatron_ft.core.memory.segment_layout import (
    TRAILER_BYTES,
    Layout,
    TensorAt,
    TensorEntry,
    Trailer,
    decode,
    decode_trailer,
    encode,
    split,
)
from megatron_ft.core.memory.snapshots import SnapshotKey

DIGEST = "0123456789abcdef" * 2
ENTRIES = (
    TensorEntry(("model", "w"), "float32", (2, 3), 0, 24, DIGEST),
    TensorEntry(("optimizer", 0, "step"), "int64", (), 24, 8, DIGEST),
    TensorEntry(("empty",), "bfloat16", (0, 5), 32, 0, DIGEST),
)
VALUES = {
    "model": {"w": TensorAt(0)},
    "optimizer": {0: {"step": TensorAt(1)}},
    "empty": TensorAt(2),
    "numbers": [1, 1.0, True, None, "text", math.inf, (2, -3)],
    1: "an int key",
    "1": "a str key",
}
LAYOUT = Layout(SnapshotKey(2, 1207), 1, 4, ENTRIES, VALUES)


def test_layout_is_read_as_it_was_written() -> None:
    read = decode(encode(LAYOUT), 32)
    assert read == LAYOUT
    assert [type(each) for each in read.values["numbers"]] == [int, float, bool, type(None), str, float, tuple]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(TREES)
def test_any_tree_of_values_is_read_as_it_was_written(values: Any) -> None:
    kept, tensors = split(values, lambda _value: False)
    read = decode(encode(Layout(SnapshotKey(0, 1), 0, 1, (), kept)), 0).values
    assert tensors == []
    assert repr(read) == repr(values)  # also tells 1 from 1.0 and True, and a list from a tuple


def _tensor(at: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    names = ("path", "dtype", "shape", "offset", "nbytes", "digest")

    def change(document: dict[str, Any]) -> None:
        for name, value in changes.items():
            document["tensors"][at][names.index(name)] = value

    return change


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


def _swap(document: dict[str, Any]) -> None:
    document["tensors"][0], document["tensors"][1] = document["tensors"][1], document["tensors"][0]


MALFORMED = {
    "overlap": _tensor(1, offset=20),
    "gap": _tensor(1, offset=28),
    "offset that is negative": _tensor(0, offset=-4),
    "bytes that don't fit the shape": _tensor(0, nbytes=20),
    "shape that doesn't fit the bytes": _tensor(0, shape=[3, 3]),
    "dtype that doesn't fit the bytes": _tensor(0, dtype="float64"),
    "dtype that is unknown": _tensor(0, dtype="object"),
    "shape that is negative": _tensor(0, shape=[-2, -3]),
    "shape of floats": _tensor(0, shape=[2.0, 3]),
    "shape of bools": _tensor(1, shape=[True]),
    "shape of too many dimensions": _tensor(1, shape=[1] * 65),
    "digest that is short": _tensor(0, digest=DIGEST[:-1]),
    "digest that is no hex": _tensor(0, digest="g" * 32),
    "digest that is no text": _tensor(0, digest=None),
    "another path": _tensor(0, path=["model", "v"]),
    "path of floats": _tensor(0, path=["model", 1.5]),
    "tensors in another order": _swap,
    "tensor that is missing": lambda document: document["tensors"].pop(),
    "tensor that isn't in the values": _set("values", {"dict": []}),
    "tensors that are no list": _set("tensors", {}),
    "unknown field": _set("more", 1),
    "rank beyond the world": _set("rank", 4),
    "another version": _set("version", 2),
    "negative iteration": _set("key", {"cycle": 0, "iteration": -1}),
    "values of unknown kind": _set("values", {"set": []}),
    "values of two kinds": _set("values", {"dict": [], "list": []}),
    "list without a kind": _set("values", []),
    "key of a dict that is null": _set("values", {"dict": [[None, 1]]}),
    "key of a dict twice": _set("values", {"dict": [["a", 1], ["a", 2]]}),
    "unknown float": _set("values", {"float": "1e999"}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_layout_is_refused(name: str) -> None:
    document = json.loads(encode(LAYOUT))
    MALFORMED[name](document)
    with pytest.raises(LayoutError):
        decode(json.dumps(document).encode(), 32)


def test_layout_that_is_nested_too_deep_is_refused() -> None:
    document = json.loads(encode(Layout(SnapshotKey(0, 1), 0, 1, (), None)))
    for _ in range(100):
        document["values"] = {"list": [document["values"]]}
    with pytest.raises(LayoutError, match="malformed"):
        decode(json.dumps(document).encode(), 0)


TRAILER = Trailer(1000, 200, bytes(range(16)))
SIZE = 1200 + TRAILER_BYTES


def test_trailer_is_read_as_it_was_written() -> None:
    assert len(TRAILER.encode()) == TRAILER_BYTES
    assert decode_trailer(TRAILER.encode(), SIZE) == TRAILER


def test_changed_bit_before_the_digest_makes_a_trailer_invalid() -> None:
    raw = TRAILER.encode()
    for bit in range(8 * (TRAILER_BYTES - 16)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LayoutError):
            decode_trailer(bytes(changed), SIZE)


class Tensor:
    """Stands in for torch's."""


def test_split_numbers_tensors_in_the_order_of_the_tree() -> None:
    first, second = Tensor(), Tensor()
    values, tensors = split({"a": [first, 1], 7: (second,)}, lambda value: isinstance(value, Tensor))
    assert values == {"a": [TensorAt(0), 1], 7: (TensorAt(1),)}
    assert tensors == [(("a", 0), first), ((7, 0), second)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is of type set"),
        ({"a": {1.5: 1}}, r"state\['a'\] has a key of type float"),
        ({"a": {True: 1}}, r"state\['a'\] has a key of type bool"),
        ({"a": b""}, r"state\['a'\] is of type bytes"),
        ({"a": 1 << 200}, r"state\['a'\] is of type int"),
    ],
)
def test_state_that_cannot_be_kept_is_refused_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        split(state, lambda _value: False)
