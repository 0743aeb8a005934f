"""Segments as files, which outlive the job: written whole or not at all, and copied back into memory.

DIR/iteration-1207-of-16-3f2a9c0d41b7/    the last part tells one life of the job from others
    rank-0 ... rank-15                    segments, byte by byte: each has the digests of all that is in it

A file has this name once all of its node are whole, and on the disk.

No link below the user's directory is followed, and only files of this user are read: others may be able to write there.
What is another one's is a ForeignFileError, a file that isn't whole a LayoutError, all else an OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from megatron_ft.errors import LayoutError
from megatron_ft.link.files.atomic_write import temporary_name
from megatron_ft.link.files.own_files import ForeignFileError, open_own_folder
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.threads import each_of
from megatron_ft.memory.rules.snapshots import SavedFiles

_BLOCK_BYTES = 16 << 20
_AT_ONCE = 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SET = re.compile(r"iteration-(\d{1,18})-of-(\d{1,7})-[0-9a-f]{12}")


def set_name(iteration: int, world: int, life: str) -> str:
    """Return the name of a snapshot's directory; ``life``: any text that no other life of the job has."""
    return f"iteration-{iteration}-of-{world}-{hashlib.sha256(life.encode()).hexdigest()[:12]}"


# -- writing ------------------------------------------------------------------------------------------------------


def write(directory: str, name: str, segments: Mapping[int, int], check: Callable[[], None] = lambda: None) -> int:
    """Write the segments of a node, by rank, and return their bytes. The disk has all of them then; after an exception
    nothing is left.

    ``check`` is called between blocks, in several threads, and raises if they aren't wanted any more.
    """
    temporary = temporary_name()
    with _opened(open_own_folder(directory)) as root, _opened(open_own_folder(os.path.join(directory, name))) as folder:
        try:
            # one stream fills no parallel file system
            each_of(
                [*segments], lambda rank: _write_file(folder, f"{temporary}-{rank}", segments[rank], check), _AT_ONCE
            )
            check()
            for rank in segments:
                os.rename(f"{temporary}-{rank}", f"rank-{rank}", src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            for rank in segments:
                for path in (f"{temporary}-{rank}", f"rank-{rank}"):
                    with contextlib.suppress(OSError):
                        os.unlink(path, dir_fd=folder)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=root)  # if no other node has written anything
            raise
        os.fsync(folder)
        os.fsync(root)
    return sum(os.fstat(fd).st_size for fd in segments.values())


def _write_file(folder: int, path: str, source: int, check: Callable[[], None]) -> None:
    with _opened(os.open(path, _NEW, 0o600, dir_fd=folder)) as fd:
        _copy(source, fd, os.fstat(source).st_size, lambda _: check())
        os.fsync(fd)


def _copy(source: int, target: int, size: int, check: Callable[[int], None]) -> None:
    buffer, at = memoryview(bytearray(min(_BLOCK_BYTES, max(1, size)))), 0
    while at < size:
        check(len(buffer))
        count = os.preadv(source, [buffer[: size - at]], at)
        if count == 0:
            raise LayoutError("the file is cut off")
        segment.write(target, buffer[:count], at)
        at += count


# -- reading ------------------------------------------------------------------------------------------------------


def load(directory: str, name: str, rank: int, make_room: Callable[[int], None] = lambda _count: None) -> int:
    """Return a sealed segment with the content of a rank's file. All of it is still to be verified.

    ``make_room`` is called with the bytes of each block before it is read, and raises if there isn't the memory.
    """
    given = open_own_folder(os.path.join(directory, name), make=False)
    with _opened(given) as folder, _opened(os.open(f"rank-{rank}", _OLD, dir_fd=folder)) as source:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), os.fstat(folder).st_uid):
            raise ForeignFileError(f"rank-{rank} isn't a regular file of this user")
        return segment.filled(status.st_size, lambda fd: _copy(source, fd, status.st_size, make_room))


# -- sets ---------------------------------------------------------------------------------------------------------


def find_sets(directory: str) -> list[tuple[SavedFiles, int]]:
    """Return the snapshots in a directory, that written last first, and the number of ranks of which it has no file.

    Makes the directory if it is missing.
    """
    found: list[tuple[int, SavedFiles, int]] = []
    with _opened(open_own_folder(directory)) as root:
        for name in os.listdir(root):
            parsed = _SET.fullmatch(name)
            with contextlib.suppress(OSError):
                if parsed is not None:
                    with _opened(open_own_folder(os.path.join(directory, name), make=False)) as folder:
                        world, written_ns = int(parsed[2]), os.fstat(folder).st_mtime_ns
                        files = SavedFiles(name, int(parsed[1]), world, max(0.0, time.time() - written_ns / 1e9))
                        lacking = {f"rank-{rank}" for rank in range(world)}.difference(os.listdir(folder))
                        found.append((written_ns, files, len(lacking)))
    return [(files, lacking) for _, files, lacking in sorted(found, key=lambda each: each[0], reverse=True)]


def remove_set(directory: str, name: str) -> None:
    """Remove a snapshot's directory. If that is cut off, what is left isn't whole."""
    path = os.path.join(directory, name)
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another launcher removes the same set
            shutil.rmtree(path)  # follows no link


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
