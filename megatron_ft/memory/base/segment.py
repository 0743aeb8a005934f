"""A segment as a memory file: how it is made, sealed, read and verified."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence

from megatron_ft.core.errors import LayoutError
from megatron_ft.memory.base.digests import MakeHasher
from megatron_ft.memory.rules.segment_layout import TRAILER_BYTES, Layout, Trailer, decode, decode_trailer

BLOCK_BYTES = 16 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NAME = "ft_snapshot"


def create() -> int:
    """Return the descriptor of an empty segment.

    Raises:
        OSError: no memory file can be made.
    """
    return os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(fd: int, nbytes: int) -> None:
    """Cut the segment to ``nbytes``, and have the kernel refuse every later change.

    Raises:
        OSError: a process has it mapped.
    """
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def read_layout(fd: int, make_hasher: MakeHasher) -> Layout:
    """Return the layout of a sealed segment.

    Raises:
        LayoutError: the segment isn't sealed, or its layout isn't sound.
        OSError: it can't be read.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise LayoutError("the descriptor isn't that of a memory file") from None
    if seals & _SEALS != _SEALS:
        raise LayoutError("the segment isn't sealed")
    trailer = read_trailer(fd)
    raw = _read(fd, trailer.data_bytes, trailer.layout_bytes)
    if _digest(raw, make_hasher) != trailer.digest:
        raise LayoutError("the layout doesn't have the digest in the trailer")
    return decode(raw, trailer)


def read_trailer(fd: int) -> Trailer:
    """Return the trailer of a segment.

    Raises:
        LayoutError: there is none.
        OSError: it can't be read.
    """
    size = os.fstat(fd).st_size
    return decode_trailer(os.pread(fd, TRAILER_BYTES, max(0, size - TRAILER_BYTES)), size)


def verify(fd: int, layout: Layout, make_hasher: MakeHasher, pause: Callable[[], None] = lambda: None) -> None:
    """Compare the digests of all tensors; ``pause`` is called after each read of up to `BLOCK_BYTES`.

    Raises:
        LayoutError: a tensor has another digest.
        OSError: the segment can't be read.
    """
    # small tensors are read together: a system call for each would take longer than their digests
    end = max((each.offset + each.nbytes for each in layout.tensors), default=0)
    buffer, first, last = memoryview(bytearray(min(BLOCK_BYTES, end))), 0, 0
    for index, entry in enumerate(layout.tensors):
        hasher, at, stop = make_hasher(), entry.offset, entry.offset + entry.nbytes
        while at < stop:
            if not first <= at < last:
                first, last = at, at + os.preadv(fd, [buffer], at)
                pause()
            if last == first:
                raise LayoutError(f"{layout.name_of(index)} is cut off")
            until = min(stop, last)
            hasher.update(buffer[at - first : until - first])
            at = until
        if hasher.digest() != entry.digest:
            raise LayoutError(f"{layout.name_of(index)} has changed: its digest is another one")


def write_end(fd: int, head: bytes, digests: Sequence[bytes], data_bytes: int, make_hasher: MakeHasher) -> int:
    """Write what follows the tensors. Return the length of the segment.

    Raises:
        OSError: there is no memory.
    """
    raw = b"".join((head, *digests))
    trailer = Trailer(data_bytes, len(head), len(raw), _digest(raw, make_hasher))
    write(fd, memoryview(raw + trailer.encode()), data_bytes)
    return data_bytes + len(raw) + TRAILER_BYTES


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``.

    Raises:
        OSError: there is no memory, or the segment is sealed.
    """
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _digest(raw: bytes, make_hasher: MakeHasher) -> bytes:
    hasher = make_hasher()
    hasher.update(raw)
    found: bytes = hasher.digest()
    return found


def _read(fd: int, offset: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(fd, min(count, BLOCK_BYTES), offset)
        if not part:
            raise LayoutError("the segment is cut off")
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)
