"""A segment as a memory file: how it is made, sealed, read and verified. Nothing maps one, so that it can be sealed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from megatron_ft.core.errors import LayoutError
from megatron_ft.core.memory.segment_layout import (
    MAX_LAYOUT_BYTES,
    TRAILER_BYTES,
    Layout,
    TensorEntry,
    Trailer,
    decode,
    decode_trailer,
    name_of,
)
from megatron_ft.ipc.memory.digests import MakeHasher

BLOCK_BYTES = 16 << 20
_GATHERED_BYTES = 1 << 20
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
    return read_unsealed_layout(fd, make_hasher)


def read_unsealed_layout(fd: int, make_hasher: MakeHasher) -> Layout:
    """Return the layout of a segment that only this process can change. Raises as `read_layout`."""
    trailer = _read_trailer(fd)
    raw = _read(fd, trailer.data_bytes, trailer.layout_bytes)
    hasher = make_hasher()
    hasher.update(raw)
    if hasher.digest() != trailer.digest:
        raise LayoutError("the layout doesn't have the digest in the trailer")
    return decode(raw, trailer.data_bytes)


def layout_digest(fd: int) -> bytes:
    """Return the digest of a segment's layout, which has those of all tensors.

    Raises:
        LayoutError: there is no trailer.
        OSError: it can't be read.
    """
    return _read_trailer(fd).digest


def _read_trailer(fd: int) -> Trailer:
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
    for entry in layout.tensors:
        hasher, at, stop = make_hasher(), entry.offset, entry.offset + entry.nbytes
        while at < stop:
            if not first <= at < last:
                first, last = at, at + os.preadv(fd, [buffer], at)
                pause()
            if last == first:
                raise LayoutError(f"{name_of(entry.path)} is cut off")
            until = min(stop, last)
            hasher.update(buffer[at - first : until - first])
            at = until
        compare(entry, hasher.hexdigest())


def compare(entry: TensorEntry, digest: str) -> None:
    """Raise LayoutError if this isn't the digest of the tensor."""
    if digest != entry.digest:
        raise LayoutError(f"{name_of(entry.path)} has changed: its digest is {digest}, not {entry.digest}")


def write_end(fd: int, raw_layout: bytes, data_bytes: int, make_hasher: MakeHasher) -> int:
    """Write the layout and the trailer behind the tensors. Return the length of the segment.

    Raises:
        OSError: there is no memory.
        LayoutError: the layout is too long.
    """
    if len(raw_layout) > MAX_LAYOUT_BYTES:
        raise LayoutError(f"the layout has {len(raw_layout)} bytes, at most {MAX_LAYOUT_BYTES} are allowed")
    hasher = make_hasher()
    hasher.update(raw_layout)
    trailer = Trailer(data_bytes, len(raw_layout), hasher.digest())
    write(fd, memoryview(raw_layout + trailer.encode()), data_bytes)
    return data_bytes + len(raw_layout) + TRAILER_BYTES


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``.

    Raises:
        OSError: there is no memory, or the segment is sealed.
    """
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


class BlockWriter:
    """Writes small blocks that follow each other without a gap together, large ones at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes, self._offset = bytearray(), 0

    def write(self, block: memoryview, offset: int) -> None:
        """Write a block at its offset, now or with the next ones. Raises as `write`."""
        # what is between two blocks may have been written before
        follows = offset == self._offset + len(self._bytes)
        if not follows or len(self._bytes) + len(block) > _GATHERED_BYTES:
            self.flush()
        if len(block) >= _GATHERED_BYTES:
            write(self._fd, block, offset)
            return
        if not self._bytes:
            self._offset = offset
        self._bytes += block

    def flush(self) -> None:
        """Write what is left. Raises as `write`."""
        if self._bytes:
            write(self._fd, memoryview(self._bytes), self._offset)
            self._bytes = bytearray()


def _read(fd: int, offset: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(fd, min(count, BLOCK_BYTES), offset)
        if not part:
            raise LayoutError("the segment is cut off")
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)
