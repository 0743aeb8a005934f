"""Files replaced as a whole: at any moment a reader sees the old content or the new, never a mixture."""

from __future__ import annotations

import os


def write_whole(path: str | os.PathLike[str], data: bytes | str, *, fsync: bool = False, mode: int = 0o666) -> None:
    """Write `data` to a temporary file beside `path`, then rename it over `path`.

    A symlink is followed, not replaced. `fsync` makes the content survive a power loss too. `mode` is the
    mode of the file (less the umask). Raises OSError, and then leaves no temporary file behind.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:  # whatever ended the write, an interrupt included, the temporary file is removed
        os.unlink(temporary)
        raise
    if fsync:
        _fsync_folder(folder)


def _fsync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
