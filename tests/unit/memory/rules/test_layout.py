"""Layout of a segment: what is written is read again, and nothing else is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import LayoutError
from megatron_ft.memory.rank.state_tree import put, take_apart
from megatron_ft.memory.rules.segment_layout import (
    TRAILER_BYTES,
    Layout,
    TensorEntry,
    Trailer,
    decode,
    decode_trailer,
    encode_head,
    encode_rows,
)
from megatron_ft.memory.rules.snapshots import SnapshotKey

DIGESTS = [bytes([number]) * 16 for number in range(3)]
ROWS = [("float32", (2, 3)), ("int64", ()), ("bfloat16", (0, 5))]
TREE = {"model": {"w": ["tensor", 0]}, "optimizer": {0: {"step": ["tensor", 1]}}, "empty": ["list", [["tensor", 2]]]}
KEY = SnapshotKey(2, 1, 1207)


def read(document: Any = None, *, digests: bytes = b"".join(DIGESTS), data_bytes: int = 32) -> Layout:
    """The layout with this head, or with the one that is written."""
    head = encode_head(KEY, 1, 4, encode_rows(ROWS), TREE) if document is None else msgspec.msgpack.encode(document)
    return decode(head + digests, Trailer(data_bytes, len(head), len(head) + len(digests), b""))


def test_layout_is_read_as_it_was_written() -> None:
    layout = read()
    assert layout == Layout(
        KEY,
        1,
        4,
        (
            TensorEntry("float32", (2, 3), 0, 24, DIGESTS[0]),
            TensorEntry("int64", (), 24, 8, DIGESTS[1]),
            TensorEntry("bfloat16", (0, 5), 32, 0, DIGESTS[2]),
        ),
        TREE,
    )
    names = [layout.name_of(number) for number in range(4)]
    assert names == ["state['model']['w']", "state['optimizer'][0]['step']", "state['empty'][0]", "tensor 3"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner),
)


@given(TREES)
def test_any_tree_of_values_is_read_as_it_was_written(values: Any) -> None:
    def place(*_: Any) -> Any:
        raise AssertionError("there is no tensor")

    tree, _ = take_apart({"v": values}, carefully=True)
    head = encode_head(KEY, 0, 1, encode_rows([]), tree)
    found = put({}, decode(head, Trailer(0, len(head), len(head), b"")).tree, place)["v"]
    assert repr(found) == repr(values)  # also tells 1 from 1.0 and True, and a list from a tuple


def _set(at: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda document: document.__setitem__(at, value)


def _tensor(number: int, dtype: Any, shape: Any) -> Callable[[list[Any]], None]:
    return lambda document: document[4].__setitem__(number, [dtype, shape])


VERSION, PLACE, RANK, TENSORS = 0, 1, 2, 4
MALFORMED = {
    "shape that doesn't fit the bytes": _tensor(0, "float32", [3, 3]),
    "dtype that doesn't fit the bytes": _tensor(0, "float64", [2, 3]),
    "dtype that is unknown": _tensor(0, "object", [2, 3]),
    "shape that is negative": _tensor(0, "float32", [-2, -3]),
    "shape of floats": _tensor(0, "float32", [2.0, 3]),
    "shape of too many dimensions": _tensor(1, "int64", [1] * 65),
    "tensor that is missing": lambda document: document[TENSORS].pop(),
    "tensors that are no list": _set(TENSORS, {}),
    "unknown field": lambda document: document.append(1),
    "missing field": lambda document: document.pop(),
    "rank beyond the world": _set(RANK, 4),
    "another version": _set(VERSION, 1),
    "negative iteration": _set(PLACE, [0, 0, -1]),
    "key without an era": _set(PLACE, [0, 7]),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_layout_is_refused(change: Callable[[list[Any]], None]) -> None:
    document = msgspec.msgpack.decode(encode_head(KEY, 1, 4, encode_rows(ROWS), TREE))
    change(document)
    with pytest.raises(LayoutError):
        read(document)


def test_changed_bit_of_the_sizes_makes_a_trailer_another_one() -> None:
    trailer, size = Trailer(1000, 150, 200, bytes(range(16))), 1200 + TRAILER_BYTES
    raw = trailer.encode()
    assert decode_trailer(raw, size) == trailer
    for bit in range(8 * (TRAILER_BYTES - 16)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = decode_trailer(bytes(changed), size)
        except LayoutError:
            continue
        assert found.head_bytes != trailer.head_bytes  # then neither the head nor the digests can be read
