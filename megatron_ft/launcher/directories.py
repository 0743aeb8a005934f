"""The launcher's two directories: one for sockets, gone after the run, and one for logs, that stays."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time

from megatron_ft.core.errors import ConfigError

__all__ = [
    "TORCH_LOGS",
    "make_log_directory",
    "make_run_directory",
    "remake_run_directory",
    "remove_if_empty",
    "remove_run_directory",
]

TORCH_LOGS = "ranks"
"""Under the log directory: torch's error files, where the user gave no --log-dir."""

_LONGEST_SOCKET_NAME = len("/monitor-99999.sock")
_SOCKET_PATH_LIMIT = 107  # sun_path of Linux, less the final zero


def make_run_directory() -> str:
    """A private directory of an unpredictable name, short enough for sockets.

    It isn't in XDG_RUNTIME_DIR, which goes when the user logs out, under a job that was to go on.

    Raises:
        ConfigError: no place can be written.
    """
    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        name_bytes = len(os.fsencode(os.path.join(base, "megatron_ft-12345678")))
        if name_bytes + _LONGEST_SOCKET_NAME > _SOCKET_PATH_LIMIT:
            continue
        try:
            return tempfile.mkdtemp(prefix="megatron_ft-", dir=base)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
    raise ConfigError(f"no directory for sockets can be made ({'; '.join(tried)}); set TMPDIR")


def remake_run_directory(path: str) -> None:
    """Make it again, by the name that the ranks know, after somebody removed it: cleaners of /tmp do, on long jobs.

    Raises:
        OSError: that can't be done, or something of another user is there meanwhile.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "something else has its name", path)


def remove_run_directory(path: str) -> None:
    """Remove it with what is in it; that it is gone already is fine."""
    shutil.rmtree(path, ignore_errors=True)


def make_log_directory(*, ft_log_dir: str | None, torch_log_dir: str | None, run_id: str) -> str:
    """The directory of the event logs, made if it isn't there: the one that was asked for, or a new one.

    Raises:
        ConfigError: it can't be made or written.
    """
    if ft_log_dir:
        return _make(os.path.abspath(ft_log_dir), "--ft-log-dir")
    if torch_log_dir and torch_log_dir != os.devnull:
        return _make(os.path.join(os.path.abspath(torch_log_dir), "megatron_ft"), "--log-dir")
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # a run id may hold anything; what is kept of it is for the eye, the stamp and the number make it unique
    name = f"{stamp}-{re.sub(r'[^A-Za-z0-9._-]+', '_', run_id)[:40]}"
    base = _make(os.path.join(state, "megatron_ft"), "the user's state directory (choose one with --ft-log-dir)")
    return _make_new(os.path.join(base, name))


def remove_if_empty(path: str) -> None:
    """Take back a log directory in which nothing was written."""
    for each in (os.path.join(path, TORCH_LOGS), path):
        with contextlib.suppress(OSError):  # not there, or not empty
            os.rmdir(each)


def _make(path: str, source: str) -> str:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        # a probe, because access() knows nothing of full quotas and read-only mounts
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise ConfigError(f"{source}: {path} is no directory") from None
    except OSError as error:
        raise ConfigError(f"{source}: {path} can't be written: {error.strerror}") from None
    return path


def _make_new(path: str) -> str:
    for number in range(1, 1000):
        candidate = path if number == 1 else f"{path}-{number}"
        try:
            os.mkdir(candidate, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{candidate} can't be made: {error.strerror}") from None
        return candidate
    raise ConfigError(f"{path} and its next 999 names are taken")
