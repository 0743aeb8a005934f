"""Files replaced as a whole: at any moment a reader sees the old content or the new, never a mixture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator


def write_whole(path: str | os.PathLike[str], data: bytes | str, *, fsync: bool = False, mode: int = 0o666) -> None:
    """Write `data` to a temporary file beside `path`, then rename it over `path`.

    A symlink is followed, not replaced. `fsync` makes the content survive a power loss too. `mode` is the
    mode of the file (less the umask). Raises OSError, and then leaves no temporary file behind.
    """
    target = os.path.realpath(path)
    with opened_folder(os.path.dirname(target)) as folder:
        replace(
            folder, os.path.basename(target), data.encode() if isinstance(data, str) else data, mode=mode, fsync=fsync
        )


@contextlib.contextmanager
def opened_folder(path: str) -> Iterator[int]:
    """Yield a descriptor of a directory, which needn't be readable."""
    folder = os.open(path or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def replace(
    folder: int,
    name: str,
    data: bytes,
    check: Callable[[int], None] = lambda _owner: None,
    *,
    mode: int,
    fsync: bool,
) -> None:
    """Write a temporary file in the open `folder`, then rename it to `name`.

    `check` is called before each of the two steps with the owner of the temporary file, and raises if the file must not
    be replaced.
    """
    temporary = temporary_name()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            owner = os.fstat(descriptor).st_uid
            check(owner)  # before writing, to spare a useless write
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(descriptor)
        check(owner)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # whatever ended the write, an interrupt included, the temporary file is removed
        os.unlink(temporary, dir_fd=folder)
        raise
    if fsync:  # if this fails, the file is in place nevertheless
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(readable)
        finally:
            os.close(readable)


def temporary_name() -> str:
    return f".{os.getpid()}-{os.urandom(4).hex()}.tmp"
