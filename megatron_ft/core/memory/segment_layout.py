"""Bytes of a segment: one rank's state of one iteration. Pure; the caller computes digests.

    tensors, one after the other without gaps | layout (JSON) | trailer

The trailer has a fixed size and the digest of the layout; the layout has a digest for each tensor. Every byte is
covered, so a changed one is found. A layout is checked in full before anything is done with it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.codec import Count, Fact, Rank, WorldSize, convert, to_builtins
from megatron_ft.core.errors import LayoutError, ProtocolError, SnapshotError
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.wording import shown

VERSION = 1
DIGEST_BYTES = 16
MAX_LAYOUT_BYTES = 1 << 28
_MAGIC = b"ftmemcp1"
_TRAILER = struct.Struct(f">8sQQ{DIGEST_BYTES}s")
TRAILER_BYTES = _TRAILER.size
_MAX_DIMENSIONS = 64
_MAX_DEPTH = 64
_MAX_INT = 1 << 128
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by torch's name of its dtype."""

Path = tuple[str | int, ...]
"""Keys of dicts, and positions in lists and tuples, from the state down to a value."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Place of a tensor in a tree of values. ``index``: of its entry in the layout."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor. ``offset``: of its first byte in the segment; ``digest``: hexadecimal."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str


class _LayoutHead(Fact, frozen=True):
    key: SnapshotKey
    rank: Rank
    world: WorldSize
    version: Count = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Content of a segment. ``values``: the state, with a `TensorAt` for each tensor."""

    key: SnapshotKey
    rank: int
    world: int
    tensors: tuple[TensorEntry, ...]
    values: Any


@dataclass(frozen=True, slots=True)
class Trailer:
    """Sizes of the parts before the trailer, and the digest of the layout."""

    data_bytes: int
    layout_bytes: int
    digest: bytes

    def encode(self) -> bytes:
        return _TRAILER.pack(_MAGIC, self.data_bytes, self.layout_bytes, self.digest)


def decode_trailer(raw: bytes, size: int) -> Trailer:
    """Return the trailer of a segment of ``size`` bytes.

    Raises:
        LayoutError: it isn't one, or belongs to a segment of another size.
    """
    if len(raw) != TRAILER_BYTES:
        raise LayoutError(f"the segment of {size} bytes is too short for a trailer")
    magic, data_bytes, layout_bytes, digest = _TRAILER.unpack(raw)
    if magic != _MAGIC:
        raise LayoutError("the segment has no trailer")
    if layout_bytes > MAX_LAYOUT_BYTES or data_bytes + layout_bytes + TRAILER_BYTES != size:
        raise LayoutError(f"the trailer is of a segment of another size than {size} bytes")
    return Trailer(data_bytes, layout_bytes, digest)


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor.

    Raises:
        LayoutError: the dtype is unknown.
    """
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"dtype {shown(dtype)} is unknown")
    return math.prod(shape) * ITEM_BYTES[dtype]


# -- the state as a tree ------------------------------------------------------------------------------------------


def split(state: object, is_tensor: Callable[[object], bool]) -> tuple[Any, list[tuple[Path, Any]]]:
    """Return the state with a `TensorAt` in place of each tensor, and the tensors with their paths.

    Raises:
        SnapshotError: the state has a value of a type that can't be kept; the message names its path.
    """
    tensors: list[tuple[Path, Any]] = []

    def visit(value: Any, path: Path) -> Any:
        if is_tensor(value):
            tensors.append((path, value))
            return TensorAt(len(tensors) - 1)
        if len(path) >= _MAX_DEPTH:
            raise SnapshotError(f"{name_of(path)} is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            for key in value:
                if type(key) not in (str, int):
                    raise SnapshotError(f"{name_of(path)} has a key of type {type(key).__name__}: use str or int")
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(item, (*path, at)) for at, item in enumerate(value))
        if value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < _MAX_INT):
            return value
        kinds = "tensors, numbers, strings, None, and dicts, lists and tuples of them"
        raise SnapshotError(f"{name_of(path)} is of type {type(value).__name__}; a state holds {kinds}")

    return visit(state, ()), tensors


def name_of(path: Path) -> str:
    """Return a path for a line, as in ``state['model']['weight']``."""
    return "state" + "".join(f"[{key!r}]" for key in path)


# -- layout -------------------------------------------------------------------------------------------------------


def encode(layout: Layout) -> bytes:
    """Return the JSON of a layout."""
    head = to_builtins(_LayoutHead(layout.key, layout.rank, layout.world, VERSION))
    tensors = [[list(e.path), e.dtype, list(e.shape), e.offset, e.nbytes, e.digest] for e in layout.tensors]
    document = {**head, "tensors": tensors, "values": _written(layout.values)}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode(raw: bytes, data_bytes: int) -> Layout:
    """Return the layout of a segment with ``data_bytes`` of tensors, checked in full.

    Raises:
        LayoutError: it is malformed, or doesn't describe these bytes.
    """
    try:
        document = json.loads(raw.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the layout is not JSON: {error}") from None
    if type(document) is not dict or document.keys() != {"key", "rank", "world", "version", "tensors", "values"}:
        raise LayoutError("the layout has other fields than those of a layout")
    try:
        head = convert(_LayoutHead, document)
    except ProtocolError as error:
        raise LayoutError(f"the layout is malformed: {error}") from None
    if head.version != VERSION:
        raise LayoutError(f"the layout is of version {head.version}, not {VERSION}")
    if head.rank >= head.world:
        raise LayoutError(f"the layout is of rank {head.rank} of {head.world} ranks")
    tensors = _entries(document["tensors"], data_bytes)
    found: list[Path] = []
    values = _read(document["values"], (), found)
    if found != [entry.path for entry in tensors]:
        raise LayoutError("the layout lists other tensors than its values have")
    return Layout(head.key, head.rank, head.world, tensors, values)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _entries(rows: Any, data_bytes: int) -> tuple[TensorEntry, ...]:
    """Return the entries, which must fill the data without a gap: so none overlaps another, or lies outside."""
    if type(rows) is not list:
        raise LayoutError("the layout has no list of tensors")
    entries, end = [], 0
    for row in rows:
        entry = _entry(row)
        if entry.offset != end:
            raise LayoutError(f"{name_of(entry.path)} begins at byte {entry.offset}, not at {end}")
        end += entry.nbytes
        entries.append(entry)
    if end != data_bytes:
        raise LayoutError(f"the tensors of the layout have {end} bytes, the segment has {data_bytes}")
    return tuple(entries)


def _entry(row: Any) -> TensorEntry:
    if type(row) is not list or len(row) != 6:
        raise LayoutError(f"a tensor of the layout is malformed: {shown(row)}")
    path, dtype, shape, offset, nbytes, digest = row
    if type(path) is not list or any(type(key) not in (str, int) for key in path) or type(dtype) is not str:
        raise LayoutError(f"a tensor of the layout is malformed: {shown(row)}")
    name = name_of(tuple(path))
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise LayoutError(f"{name} has the shape {shown(shape)}")
    if type(offset) is not int or type(nbytes) is not int or nbytes != nbytes_of(dtype, shape):
        raise LayoutError(f"{name} has {shown(nbytes)} bytes at {shown(offset)}, which don't fit its dtype and shape")
    if type(digest) is not str or len(digest) != 2 * DIGEST_BYTES or set(digest) - set("0123456789abcdef"):
        raise LayoutError(f"{name} has no digest")
    return TensorEntry(tuple(path), dtype, tuple(shape), offset, nbytes, digest)


# In JSON a container, a tensor and a float that JSON lacks are objects with one name each.
_DICT, _LIST, _TUPLE, _TENSOR, _FLOAT = "dict", "list", "tuple", "tensor", "float"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _written(value: Any) -> Any:
    match value:
        case TensorAt(index):
            return {_TENSOR: index}
        case dict():
            return {_DICT: [[key, _written(item)] for key, item in value.items()]}
        case list():
            return {_LIST: [_written(item) for item in value]}
        case tuple():
            return {_TUPLE: [_written(item) for item in value]}
        case float() if not math.isfinite(value):
            return {_FLOAT: repr(value)}
    return value


def _read(node: Any, path: Path, found: list[Path]) -> Any:
    """Return the value of a node; the paths of its tensors are added to ``found``, in the order of their numbers."""
    if type(node) is not dict:
        if node is None or type(node) in (bool, int, float, str):
            return node
        raise LayoutError(f"{name_of(path)} is malformed: {shown(node)}")
    if len(node) != 1 or len(path) > _MAX_DEPTH:
        raise LayoutError(f"{name_of(path)} is malformed: {shown(node)}")
    ((kind, content),) = node.items()
    if kind == _TENSOR and type(content) is int and content == len(found):
        found.append(path)
        return TensorAt(content)
    if kind == _FLOAT and type(content) is str and content in _FLOATS:
        return _FLOATS[content]
    if kind == _DICT and type(content) is list:
        return dict(_items(content, path, found))
    if kind in (_LIST, _TUPLE) and type(content) is list:
        items = [_read(item, (*path, at), found) for at, item in enumerate(content)]
        return items if kind == _LIST else tuple(items)
    raise LayoutError(f"{name_of(path)} is malformed: {shown(node)}")


def _items(content: list[Any], path: Path, found: list[Path]) -> Iterator[tuple[str | int, Any]]:
    seen: set[str | int] = set()
    for pair in content:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in seen:
            raise LayoutError(f"{name_of(path)} has the malformed item {shown(pair)}")
        seen.add(pair[0])
        yield pair[0], _read(pair[1], (*path, pair[0]), found)
