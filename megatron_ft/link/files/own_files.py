"""Files in directories that other users can write to: no links followed, only own files replaced.

The rule for one name in such a directory:

* Only regular files are opened, never through a link in their place, and never blocking on a FIFO or a device.
* Only regular files of this user are replaced, and links, if the link or the directory is this user's. Everything
  else stays as it is, and raises `ForeignFileError`.

The path of the directory is the user's choice, and may contain links. "This user" is the owner that the file system
gives to files created by this process: a file server may map root to another user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from megatron_ft.link.files.atomic_write import opened_folder, replace, temporary_name

_READABLE_BYTES = 64 << 20


class ForeignFileError(OSError):
    """Raised if a path holds something else than a regular file of this user; ``strerror`` says what."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EPERM, what)

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file, of any user, but not through a link in its place.

    Raises:
        ForeignFileError: the path isn't a regular file.
        OSError: the file can't be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP: a link; ENXIO: a FIFO that no process reads, or a socket; EISDIR: a directory
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ForeignFileError(_what(os.lstat(path))) from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise ForeignFileError(_what(found))
    os.set_blocking(fd, True)
    return fd


def read_own(path: str, *, of_any_user: bool = False) -> bytes:
    """Return the content of a file that this user or root has written; ``of_any_user``: for commands that only show it.

    Raises:
        ForeignFileError: the path isn't such a file.
        OSError: the file can't be read; FileNotFoundError if there is none.
    """
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        is_own = owner in (0, os.geteuid()) or of_any_user or owner == _own_uid(os.path.dirname(path) or ".")
        if not is_own:
            raise ForeignFileError(f"is a file of another user ({owner})")
        data = file.read(_READABLE_BYTES + 1)
    if len(data) > _READABLE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return data


def replace_own(path: str, data: bytes) -> None:
    """Write a file of mode 0600 atomically and to the disk, replacing one of this user's, if there is one.

    Raises:
        ForeignFileError: something else is in its place, and stays.
        OSError: the file can't be written; no temporary file is left.
    """
    name = os.path.basename(path)
    with opened_folder(os.path.dirname(path)) as folder:
        replace(folder, name, data, lambda own: _check_replaceable(folder, name, own), mode=0o600, fsync=True)


def open_own_folder(path: str, *, make: bool = True) -> int:
    """Return a descriptor of a directory. If it is missing, and ``make``, create it with mode 0700.

    Raises:
        ForeignFileError: the path is no directory, or one of another user.
        OSError: the directory can't be made or opened.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignFileError(_what(os.lstat(path))) from None
        raise
    owner = os.fstat(folder).st_uid
    try:
        if owner not in (0, os.geteuid()) and owner != _own_uid(path):
            raise ForeignFileError(f"is a directory of another user ({owner})")
    except OSError:
        os.close(folder)
        raise
    return folder


def _check_replaceable(folder: int, name: str, own: int) -> None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode) and own in (found.st_uid, os.fstat(folder).st_uid):
        return  # renaming over a link touches nothing that it points to
    if not stat.S_ISREG(found.st_mode):
        raise ForeignFileError(_what(found))
    if found.st_uid != own:
        raise ForeignFileError(f"is a file of another user ({found.st_uid})")


def _own_uid(folder: str) -> int | None:
    """Return the owner of files that this process creates in a directory; None if it can't create any."""
    path = os.path.join(folder, temporary_name())
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(path)


def _what(found: os.stat_result) -> str:
    kinds = {
        stat.S_IFLNK: "symbolic link",
        stat.S_IFIFO: "FIFO",
        stat.S_IFDIR: "directory",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }
    kind = kinds.get(stat.S_IFMT(found.st_mode), "file")
    whose = "" if found.st_uid == os.geteuid() else f" of another user ({found.st_uid})"
    return f"is a {kind}{whose}"
