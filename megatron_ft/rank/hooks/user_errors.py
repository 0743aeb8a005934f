"""User errors that only a rank can find: print one line and end the job, since a restart would fail again."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import NoReturn

from megatron_ft.core.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.core.errors import ConfigError, RankMonitorClientError
from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.rank.base import say
from megatron_ft.rank.client.client import RankMonitorClient

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
"""Errors that may be gone by the first save: no reason to end the job."""


def ask_for_no_restart(problem: str) -> None:
    with contextlib.suppress(RankMonitorClientError, OSError):  # no launcher: the user still reads the error
        request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, problem)
        RankMonitorClient().send_workload_control_request(request)


@contextlib.contextmanager
def no_restart_for_mistakes() -> Iterator[None]:
    """Ask the launcher not to restart if a ConfigError passes."""
    try:
        yield
    except ConfigError as error:
        ask_for_no_restart(str(error))
        raise


def end_job(problem: str) -> NoReturn:
    """Print the problem on rank 0, ask the launcher not to restart, and end this rank. All ranks call this.

    Raises:
        SystemExit: always.
    """
    say.error(problem)
    ask_for_no_restart(problem)
    raise SystemExit(MISTAKE_CODE)


def why_unusable(path: str | os.PathLike[str], *, create: bool) -> str | None:
    """Return one line why a save directory can't be used, None if it can, or if that can't be known yet.

    Args:
        path: the directory.
        create: create a missing directory, and try to write a file. For one rank only, so that not all ranks create
        files in a shared directory; the others check permissions.
    """
    try:
        if create:
            if not os.path.exists(path):
                os.makedirs(path, exist_ok=True)
            try_to_write(path)
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
            "Choose another directory, or make this one writable"
        )
    return None


def try_to_write(path: str | os.PathLike[str]) -> None:
    """Create a file and remove it again.

    Raises:
        OSError: the file can't be created or removed.
    """
    name = os.path.join(path, f".ft_probe.{secrets.token_hex(8)}")
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileNotFoundError:
        if os.path.isdir(path):
            raise  # a directory in which no file can be made, as in /proc
        return  # removed in the meantime: saving will create it again
    os.unlink(name)
