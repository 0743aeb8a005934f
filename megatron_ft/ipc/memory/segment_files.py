"""Segments as files, which outlive the job: written whole or not at all, and copied back into memory.

`core.memory.saved_files` has the names. No link below the user's directory is followed, and only files of this user are
read: it may be one that others can write to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ft.core.errors import LayoutError
from megatron_ft.core.memory import saved_files
from megatron_ft.core.memory.saved_files import MANIFEST, Manifest, SavedSegment
from megatron_ft.core.memory.segment_layout import encode
from megatron_ft.core.memory.snapshots import EARLIER_LIFE, SavedFiles, SnapshotKey
from megatron_ft.ipc.files.atomic_write import temporary_name
from megatron_ft.ipc.files.own_files import ForeignFileError, open_own_folder
from megatron_ft.ipc.memory import segment
from megatron_ft.ipc.memory.digests import MakeHasher

_AT_ONCE = 8
"""Files that are written at a time: one stream fills no parallel file system."""
_MOST_MANIFEST = 64 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REMOVED = ".removed-"


class SegmentToWrite(NamedTuple):
    """Verified segment of a rank."""

    rank: int
    fd: int


@dataclass(frozen=True)
class FoundSet:
    """Directory of a snapshot. ``lacking``: number of ranks without a file."""

    files: SavedFiles
    lacking: int


# -- writing ------------------------------------------------------------------------------------------------------


def write_part(
    directory: str,
    name: str,
    segments: Sequence[SegmentToWrite],
    key: SnapshotKey,
    world: int,
    make_hasher: MakeHasher,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Write the files of consecutive ranks, and return their bytes. The disk has all of them then.

    ``check`` is called between blocks, in several threads, and raises if they aren't wanted any more.

    Raises:
        ForeignFileError: something else is in the place of a directory.
        OSError: they can't be written; nothing is left.
        any exception of ``check``; nothing is left.
    """
    with _opened(open_own_folder(directory)) as root, _opened(open_own_folder(os.path.join(directory, name))) as whole:
        temporary = temporary_name()
        os.mkdir(temporary, 0o700, dir_fd=whole)
        try:
            with _opened(os.open(temporary, _FOLDER, dir_fd=whole)) as folder:
                written = _write_files(folder, segments, check)
                raw = saved_files.encode(Manifest(key, world, tuple(written)))
                _write_manifest(folder, raw, make_hasher)
                os.fsync(folder)
            check()
            _rename(whole, temporary, saved_files.part_name([each.rank for each in segments]))
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_tree(whole, temporary)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=root)  # if no other node has written anything
            raise
        os.fsync(whole)
        os.fsync(root)
    return sum(each.nbytes for each in written)


def _write_files(folder: int, segments: Sequence[SegmentToWrite], check: Callable[[], None]) -> list[SavedSegment]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda each: _write_file(folder, each, check), segments))


def _write_file(folder: int, given: SegmentToWrite, check: Callable[[], None]) -> SavedSegment:
    size = os.fstat(given.fd).st_size
    with _opened(os.open(saved_files.file_name(given.rank), _NEW, 0o600, dir_fd=folder)) as fd:
        _copy(given.fd, fd, size, check)
        os.fsync(fd)
    return SavedSegment(given.rank, size, segment.layout_digest(given.fd).hex())


def _write_manifest(folder: int, raw: bytes, make_hasher: MakeHasher) -> None:
    with _opened(os.open(MANIFEST, _NEW, 0o600, dir_fd=folder)) as fd:
        segment.write(fd, memoryview(raw + b"\n" + _digest(raw, make_hasher) + b"\n"), 0)
        os.fsync(fd)


def _digest(raw: bytes, make_hasher: MakeHasher) -> bytes:
    hasher = make_hasher()
    hasher.update(raw)
    found: bytes = hasher.hexdigest().encode()
    return found


def _rename(folder: int, temporary: str, name: str) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _remove_tree(folder, temporary)  # another node has written the same ranks


def _copy(source: int, target: int, size: int, check: Callable[[], None]) -> None:
    buffer, at = memoryview(bytearray(min(segment.BLOCK_BYTES, max(1, size)))), 0
    while at < size:
        check()
        count = os.preadv(source, [buffer[: size - at]], at)
        if count == 0:
            raise LayoutError("the file is cut off")
        segment.write(target, buffer[:count], at)
        at += count


# -- reading ------------------------------------------------------------------------------------------------------


def load(
    directory: str,
    name: str,
    rank: int,
    world: int,
    make_hasher: MakeHasher,
    make_room: Callable[[int], None] = lambda _count: None,
) -> int:
    """Return a sealed segment with the content of a rank's file. Its tensors are still to be verified.

    Its layout has the key of a snapshot from an `EARLIER_LIFE`. ``make_room`` is called with the bytes of each block
    before it is read, and raises if there isn't the memory.

    Raises:
        LayoutError: the file isn't the one of that rank, or is damaged.
        ForeignFileError: it isn't a regular file of this user.
        OSError: it can't be read.
        any exception of ``make_room``.
    """
    files = saved_files.parse_set(name)
    with _own_folder(directory, name) as whole:
        parts = ((each, saved_files.parse_part(each)) for each in sorted(os.listdir(whole)))
        part = next((each for each, ranks in parts if ranks is not None and rank in ranks), None)
        if part is None or files is None:
            raise LayoutError("there is no such file")
        with _opened(os.open(part, _FOLDER, dir_fd=whole)) as folder:
            owners = {os.geteuid(), os.fstat(whole).st_uid}
            manifest = _read_manifest(folder, owners, make_hasher)
            saved = next((each for each in manifest.segments if each.rank == rank), None)
            if saved is None or (manifest.key.iteration, manifest.world) != (files.iteration, files.world):
                raise LayoutError(f"the manifest of {part} is of another snapshot")
            with _opened(_open_file(folder, saved_files.file_name(rank), owners)) as source:
                return _into_memory(source, saved, manifest, world, make_hasher, make_room)


def _read_manifest(folder: int, owners: set[int], make_hasher: MakeHasher) -> Manifest:
    with open(_open_file(folder, MANIFEST, owners), "rb") as file:
        content = file.read(_MOST_MANIFEST)
    raw, newline, digest = content[:-1].rpartition(b"\n")
    if content[-1:] != b"\n" or not newline or digest != _digest(raw, make_hasher):
        raise LayoutError("the manifest doesn't have the digest at its end")
    return saved_files.decode(raw)


def _into_memory(
    source: int,
    saved: SavedSegment,
    manifest: Manifest,
    world: int,
    make_hasher: MakeHasher,
    make_room: Callable[[int], None],
) -> int:
    if os.fstat(source).st_size != saved.nbytes:
        raise LayoutError(f"the file has {os.fstat(source).st_size} bytes, not {saved.nbytes}")
    fd = segment.create()
    try:
        _copy(source, fd, saved.nbytes, lambda: make_room(min(segment.BLOCK_BYTES, saved.nbytes)))
        if segment.layout_digest(fd).hex() != saved.digest:
            raise LayoutError("the file has another digest than its manifest says")
        layout = segment.read_unsealed_layout(fd, make_hasher)
        if (layout.key, layout.rank, layout.world) != (manifest.key, saved.rank, world):
            raise LayoutError(f"the file is of rank {layout.rank} of {layout.world}")
        layout = replace(layout, key=SnapshotKey(EARLIER_LIFE, layout.key.iteration))
        data_bytes = sum(each.nbytes for each in layout.tensors)
        segment.seal(fd, segment.write_end(fd, encode(layout), data_bytes, make_hasher))
    except BaseException:
        os.close(fd)
        raise
    return fd


# -- sets ---------------------------------------------------------------------------------------------------------


def find_sets(directory: str) -> list[FoundSet]:
    """Return the snapshots in a directory, that written last first. Makes the directory if it is missing.

    Raises:
        ForeignFileError: it isn't a directory of this user.
        OSError: it can't be read or made.
    """
    found: list[tuple[int, FoundSet]] = []
    with _opened(open_own_folder(directory)) as root:
        for name in os.listdir(root):
            files = saved_files.parse_set(name)
            with contextlib.suppress(OSError):
                if files is not None:
                    with _own_folder(directory, name) as whole:
                        lacking = saved_files.lacking(os.listdir(whole), files.world)
                        found.append((os.fstat(whole).st_mtime_ns, FoundSet(files, lacking)))
                elif name.startswith(_REMOVED):
                    _remove_tree(root, name)
    return [each for _, each in sorted(found, key=lambda pair: pair[0], reverse=True)]


def remove_set(directory: str, name: str) -> None:
    """Remove a snapshot's directory: at once for its readers, then file by file.

    Raises:
        OSError: it can't be removed.
    """
    with _opened(open_own_folder(directory)) as root:
        os.rename(name, _REMOVED + name, src_dir_fd=root, dst_dir_fd=root)
        _remove_tree(root, _REMOVED + name)


def _remove_tree(parent: int, name: str) -> None:
    try:
        with _opened(os.open(name, _FOLDER, dir_fd=parent)) as folder:
            for each in os.listdir(folder):
                _remove_tree(folder, each)
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _own_folder(directory: str, name: str) -> Iterator[int]:
    """Open an existing directory of this user in the user's directory."""
    given = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with _opened(given) as root, _opened(os.open(name, _FOLDER, dir_fd=root)) as folder:
        owner = os.fstat(folder).st_uid
        if owner not in (os.geteuid(), os.fstat(root).st_uid):
            raise ForeignFileError(f"is a directory of another user ({owner})")
        yield folder


def _open_file(folder: int, name: str, owners: set[int]) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners:
        os.close(fd)
        raise ForeignFileError(f"{name} isn't a regular file of this user")
    return fd
