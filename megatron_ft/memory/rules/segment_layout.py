"""Bytes of a segment: one rank's state of one iteration. Pure; the caller computes digests.

    tensors, one after the other without gaps | head (MessagePack) | a digest for each tensor | trailer

The head has the dtype and shape of each tensor, from which its place follows, and the state as a tree in which tensors
are numbers. The trailer has a fixed size, and the digest of head and digests: a changed byte is found wherever it is.
What isn't such a segment is a LayoutError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from megatron_ft.errors import LayoutError
from megatron_ft.link.base.wording import shown
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, SnapshotKey

VERSION = 2
DIGEST_BYTES = 16
MAX_LAYOUT_BYTES = 1 << 28
_MAGIC = b"ftmemcp2"
_TRAILER = struct.Struct(f">8sQQQ{DIGEST_BYTES}s")
TRAILER_BYTES = _TRAILER.size
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
class TensorEntry:
    """One tensor. ``offset``: of its first byte in the segment."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Content of a segment. ``tree``: the state, as `memory.rank.state_tree` writes it."""

    key: SnapshotKey
    rank: int
    world: int
    tensors: tuple[TensorEntry, ...]
    tree: Any

    def name_of(self, index: int) -> str:
        """Return the path of a tensor for a line; "tensor 7" if the tree has none of that number."""
        path = path_of(self.tree, index)
        return f"tensor {index}" if path is None else name_of(path)

    def why_not(self, key: SnapshotKey, rank: int, world: int) -> str:
        """Return why this isn't the segment of that snapshot and rank; empty if it is."""
        # of one from a file only the iteration counts: its cycle was one of an earlier life
        found = self.key if key.cycle != EARLIER_LIFE else SnapshotKey(EARLIER_LIFE, 0, self.key.iteration)
        is_it = (found, self.rank, self.world) == (key, rank, world)
        return "" if is_it else f"it is of iteration {self.key.iteration}, rank {self.rank} of {self.world}"


class Trailer(NamedTuple):
    """Sizes of the parts before the trailer; ``digest``: of head and digests."""

    data_bytes: int
    head_bytes: int
    layout_bytes: int
    digest: bytes

    def encode(self) -> bytes:
        return _TRAILER.pack(_MAGIC, *self)


_Size = Annotated[int, Meta(ge=0, le=2**62)]
_Row = tuple[str, Annotated[tuple[_Size, ...], Meta(max_length=64)]]


class _Head(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    key: tuple[Annotated[int, Meta(ge=-1, le=2**62)], _Size, _Size]
    rank: _Size
    world: _Size
    tensors: tuple[_Row, ...]
    tree: Any


def encode_rows(rows: Iterable[tuple[str, Sequence[int]]]) -> Raw:
    """Return dtype and shape of all tensors as a part of a head."""
    return Raw(msgspec.msgpack.encode([(dtype, tuple(shape)) for dtype, shape in rows]))


def encode_head(key: SnapshotKey, rank: int, world: int, rows: Raw, tree: Any) -> bytes:
    """Return the head of a segment.

    Raises:
        OverflowError: an int of the tree has more than 64 bits.
        UnicodeEncodeError: a string of the tree has a lone surrogate.
    """
    return msgspec.msgpack.encode([VERSION, [key.cycle, key.era, key.iteration], rank, world, rows, tree])


def decode_trailer(raw: bytes, size: int) -> Trailer:
    """Return the trailer of a segment of ``size`` bytes."""
    if len(raw) != TRAILER_BYTES:
        raise LayoutError(f"the segment of {size} bytes is too short for a trailer")
    magic, *fields = _TRAILER.unpack(raw)
    if magic != _MAGIC:
        raise LayoutError("it has no trailer")
    trailer = Trailer(*fields)
    is_whole = trailer.data_bytes + trailer.layout_bytes + TRAILER_BYTES == size
    if not is_whole or not trailer.head_bytes <= trailer.layout_bytes <= MAX_LAYOUT_BYTES:
        raise LayoutError(f"the trailer is of a segment of another size than {size} bytes")
    return trailer


def decode(raw: bytes, trailer: Trailer) -> Layout:
    """Return the layout of a segment. Its tree isn't checked."""
    try:
        head = msgspec.msgpack.decode(raw[: trailer.head_bytes], type=_Head)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:  # TypeError: an unhashable key
        raise LayoutError(f"the layout is malformed: {error}") from None
    if head.version != VERSION:
        raise LayoutError(f"the layout is of version {head.version}, not {VERSION}")
    if head.rank >= head.world:
        raise LayoutError(f"the layout is of rank {head.rank} of {head.world} ranks")
    entries, offset, at = [], 0, trailer.head_bytes
    for dtype, shape in head.tensors:
        if dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype {shown(dtype)} is unknown")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(TensorEntry(dtype, shape, offset, nbytes, raw[at : at + DIGEST_BYTES]))
        offset, at = offset + nbytes, at + DIGEST_BYTES
    if (offset, at) != (trailer.data_bytes, len(raw)):
        raise LayoutError(f"the layout is of {offset} bytes of tensors and {len(entries)} digests, the segment isn't")
    return Layout(SnapshotKey(*head.key), head.rank, head.world, tuple(entries), head.tree)


def name_of(path: Path) -> str:
    """Return a path for a line, as in ``state['model']['weight']``."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def path_of(node: Any, index: int) -> Path | None:
    """Return the path of a tensor in a tree, of which nothing is known."""
    if node == ["tensor", index]:
        return ()
    items: Any = ()
    if type(node) is dict:
        items = node.items()
    elif type(node) is list and node and type(node[-1]) is list:
        items = enumerate(node[-1])
    for key, item in items:
        found = path_of(item, index)
        if found is not None:
            return (key, *found)
    return None
