"""A segment as a memory file: how it is made, mapped, sealed, read and verified.

All raise `LayoutError` for a segment that isn't sealed or is damaged, and `OSError` if there is no memory for it or it
can't be read.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

from megatron_ft.core.errors import LayoutError
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.rules.segment_layout import TRAILER_BYTES, Layout, Trailer, decode, decode_trailer

CHUNK_BYTES = 64 << 20
"""Bytes that are allocated, mapped, or let go of, at a time: meanwhile the kernel lets no other thread allocate."""
NAME = "ft_snapshot"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE, _POPULATE_READ = 23, 22

libc = ctypes.CDLL(None, use_errno=True)
_word, _address = ctypes.c_size_t, ctypes.c_void_p
libc.mmap.argtypes = (_address, _word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
libc.mmap.restype = _address
libc.munmap.argtypes = (_address, _word)
libc.madvise.argtypes = (_address, _word, ctypes.c_int)


class Mapping:
    """A segment in this process's address space. A fork doesn't get it: no process could seal the segment then."""

    def __init__(self, fd: int, nbytes: int, *, writes: bool = False) -> None:
        """Map and touch every page; ``fd`` stays the caller's."""
        self.fd, self.nbytes = fd, nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        kind = mmap.MAP_SHARED if writes else mmap.MAP_PRIVATE
        found = libc.mmap(None, max(1, nbytes), protection, kind, fd, 0)
        if found in (None, _word(-1).value):
            raise OSError(ctypes.get_errno(), "a segment can't be mapped")
        self.address: int = found
        libc.madvise(found, nbytes, mmap.MADV_DONTFORK)
        populate = _POPULATE_WRITE if writes else _POPULATE_READ
        for at in range(0, nbytes, CHUNK_BYTES):  # a kernel that doesn't know this touches pages as they are used
            libc.madvise(found + at, min(CHUNK_BYTES, nbytes - at), populate)

    def bytes(self, offset: int, nbytes: int) -> memoryview:
        """Return a part, which must not be used once this is closed."""
        return memory_at(self.address + offset, nbytes)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            for at in range(0, max(1, self.nbytes), CHUNK_BYTES):
                libc.munmap(address + at, min(CHUNK_BYTES, max(1, self.nbytes) - at))


def memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def create() -> int:
    """Return the descriptor of an empty segment."""
    return os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


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
    if digest(raw) != trailer.digest:
        raise LayoutError("the layout doesn't have the digest in the trailer")
    return decode(raw, trailer)


def verify(mapping: Mapping, layout: Layout, index: int, digest: Digest) -> None:
    """Compare the digest of a tensor."""
    entry = layout.tensors[index]
    if digest(mapping.bytes(entry.offset, entry.nbytes)) != entry.digest:
        raise LayoutError(f"{layout.name_of(index)} has changed: its digest is another one")


def write_end(fd: int, head: bytes, digests: Sequence[bytes], data_bytes: int, digest: Digest) -> int:
    """Write what follows the tensors. Return the length of the segment."""
    raw = b"".join((head, *digests))
    write(fd, memoryview(raw + Trailer(data_bytes, len(head), len(raw), digest(raw)).encode()), data_bytes)
    return data_bytes + len(raw) + TRAILER_BYTES


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
