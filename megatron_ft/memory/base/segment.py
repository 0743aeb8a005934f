"""A segment as a memory file: how it is made, sealed, read and verified.

All raise `LayoutError` for a segment that isn't sealed or is damaged, and `OSError` if there is no memory for it or it
can't be read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence

from megatron_ft.errors import LayoutError
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.rules.segment_layout import (
    TRAILER_BYTES,
    Layout,
    TensorEntry,
    Trailer,
    decode,
    decode_trailer,
)

CHUNK_BYTES = 64 << 20
"""Bytes that are allocated, mapped, or let go of, at a time: meanwhile the kernel lets no other thread allocate."""
BLOCK_BYTES = 1 << 20
"""Bytes that are read at a time: their digest is computed while they are in the processor's cache."""
NAME = "ft_snapshot"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create() -> int:
    """Return the descriptor of an empty segment."""
    return os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def filled(nbytes: int, fill: Callable[[int], None]) -> int:
    """Return the descriptor of a sealed segment, which ``fill`` writes. If that raises, nothing is left."""
    fd = create()
    try:
        fill(fd)
        seal(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int, nbytes: int) -> None:
    """Cut the segment to ``nbytes``, and have the kernel refuse every later change. No process may have it mapped."""
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def read_layout(fd: int, digest: Digest) -> Layout:
    """Return the layout of a sealed segment."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise LayoutError("the descriptor isn't that of a memory file") from None
    if seals & _SEALS != _SEALS:
        raise LayoutError("the segment isn't sealed")
    size = os.fstat(fd).st_size
    trailer = decode_trailer(os.pread(fd, TRAILER_BYTES, max(0, size - TRAILER_BYTES)), size)
    raw = os.pread(fd, trailer.layout_bytes, trailer.data_bytes)
    if digest([raw]) != trailer.digest:
        raise LayoutError("the layout doesn't have the digest in the trailer")
    return decode(raw, trailer)


def read(fd: int, entry: TensorEntry, into: memoryview) -> Iterator[memoryview]:
    """Read a tensor, and yield it block by block. Memory that is smaller than the tensor is filled again and again."""
    at = 0
    while at < entry.nbytes:
        start = at % len(into)
        count = min(BLOCK_BYTES, entry.nbytes - at, len(into) - start)
        found = os.preadv(fd, [into[start : start + count]], entry.offset + at)
        if not found:
            raise LayoutError("the segment is cut off")
        yield into[start : start + found]
        at += found


def verify(fd: int, layout: Layout, index: int, into: memoryview, digest: Digest) -> None:
    """Read a tensor, and compare its digest."""
    entry = layout.tensors[index]
    if digest(read(fd, entry, into)) != entry.digest:
        raise LayoutError(f"{layout.name_of(index)} has changed: its digest is another one")


def write_end(fd: int, head: bytes, digests: Sequence[bytes], data_bytes: int, digest: Digest) -> int:
    """Write what follows the tensors. Return the length of the segment."""
    raw = b"".join((head, *digests))
    write(fd, memoryview(raw + Trailer(data_bytes, len(head), len(raw), digest([raw])).encode()), data_bytes)
    return data_bytes + len(raw) + TRAILER_BYTES


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
