"""The save directory: made by rank 0, and found out early if nothing can be written there."""

from __future__ import annotations

import errno
import os
import secrets
import stat

__all__ = ["why_unusable"]

_PASSING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.EAGAIN,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
}
"""Troubles that may be over by the first save: no reason to end the job for good."""


def why_unusable(path: str | os.PathLike[str], *, create: bool) -> str | None:
    """One line why the directory can't be used, or None if it can (or if that can't be known yet).

    Args:
        path: the directory.
        create: make it if it isn't there, and try to write in it; else (on all ranks but one, which would
            otherwise all create files in one shared directory) it is only checked.
    """
    try:
        if create:
            if not os.path.exists(path):
                os.makedirs(path, exist_ok=True)
            _probe(path)
        elif not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        elif not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.errno in _PASSING or (not create and error.errno == errno.ENOENT):
            return None
        reason = os.strerror(error.errno) if error.errno else str(error)
        return (
            f"the save directory {os.fspath(path)} can't be written: {reason}. "
            "Choose another one or mend its permissions"
        )
    return None


def _probe(path: str | os.PathLike[str]) -> None:
    """Create a file and remove it again.

    Raises:
        OSError: it can't be done.
    """
    name = os.path.join(path, f".ft_probe.{secrets.token_hex(8)}")
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileNotFoundError:
        if os.path.isdir(path):
            raise  # a directory in which no file can be made, as in /proc
        return  # removed since: saving will create it again
    os.unlink(name)
