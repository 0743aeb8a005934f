"""The directory of the event logs, which stays after the run."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import tempfile
import time

from megatron_ft.errors import ConfigError
from megatron_ft.launcher.base.run_directory import is_open_to_others

TORCH_LOGS = "ranks"
"""Subdirectory of torch's error files, if the user gave no --log-dir."""

_STATE = "the user's state directory (choose one with --ft-log-dir)"


def make_log_directory(*, ft_log_dir: str | None, torch_log_dir: str | None, run_id: str, job_name: str = "") -> str:
    """Return the directory of the event logs, created if missing: the requested one, or a new one.

    With a ``job_name`` it is common to all nodes and lives of the job that share a home.

    Raises:
        ConfigError: the requested path is no directory.
        OSError: it can't be made or written, in one line: a full disk is no user error.
    """
    if ft_log_dir:
        return _make(os.path.abspath(ft_log_dir), "--ft-log-dir")
    if torch_log_dir and torch_log_dir != os.devnull:
        return _make(os.path.join(os.path.abspath(torch_log_dir), "megatron_ft"), "--log-dir")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # a run id may contain anything, and only serves the reader. A home may be shared by all nodes of a job, whose
    # launchers start in the same second: host and process make the name unique
    words = [run_id[:40], socket.gethostname()[:64], str(os.getpid())]
    name = "-".join([stamp, *(re.sub(r"[^A-Za-z0-9._-]+", "_", word) for word in words)])
    state = _state_directory()
    try:
        _make_directories(state, mode=0o700)
        own, is_taken = os.path.join(state, "megatron_ft"), False
        # taken by another user, neither root nor the owner of the directory
        with contextlib.suppress(FileNotFoundError):
            is_taken = os.lstat(own).st_uid not in (0, os.geteuid(), os.stat(state).st_uid)
        if is_taken:
            own = tempfile.mkdtemp(prefix="megatron_ft-", dir=state)
    except OSError as error:
        raise OSError(f"{_STATE}: {state} can't be written: {error.strerror}") from None
    if job_name:
        return _make(os.path.join(_make(own, _STATE), job_name), _STATE)
    path = os.path.join(_make(own, _STATE), name)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # process 1 of another container with the same host name
        return tempfile.mkdtemp(prefix=f"{os.path.basename(path)}-", dir=os.path.dirname(path))
    return path


def doubt_about(log_dir: str) -> str | None:
    """Return a warning if users other than root may remove or replace files there, else None.

    A group with write permission is no reason: users who share a project set it up so.
    """
    with contextlib.suppress(OSError):
        owners = {os.lstat(log_dir).st_uid, os.stat(log_dir).st_uid} - {0, os.geteuid()}
        what = "who may remove and replace what is written there, but not read it"
        if owners:
            name = f"uid {min(owners)}"
            with contextlib.suppress(KeyError):
                name = pwd.getpwuid(min(owners)).pw_name
            return f"the log directory {log_dir} belongs to another user ({name}), {what}"
        if is_open_to_others(log_dir):
            return f"the log directory {log_dir} can be written by all users, {what}"
    return None


def remove_if_empty(path: str) -> None:
    """Remove a log directory in which nothing was written."""
    for each in (os.path.join(path, TORCH_LOGS), path):
        with contextlib.suppress(OSError):  # not there, or not empty
            os.rmdir(each)


def _make(path: str, source: str) -> str:
    try:
        _make_directories(path, mode=0o700)
        # a probe, because access() knows nothing of full quotas and read-only mounts
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{source}: {path} is no directory") from None
    except OSError as error:
        raise OSError(f"{source}: {path} can't be written: {error.strerror}") from None
    return path


def _make_directories(path: str, *, mode: int) -> None:
    """Create directories that only this user can write to, whatever the umask; ``os.makedirs`` applies ``mode`` only to
    the last.

    Raises:
        OSError: a directory can't be made; FileExistsError if something else is in its place.
    """
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if os.path.isdir(parent):  # /proc and the like
            raise
        _make_directories(parent, mode=0o755)
        _make_directories(path, mode=mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _state_directory() -> str:
    """Return the directory for persistent state of this user's programs.

    Raises:
        FileNotFoundError: the user has no home.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # the specification says to ignore a relative one
        return os.path.normpath(given)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise FileNotFoundError("there is no home directory to write logs to: choose a place with --ft-log-dir")
    return os.path.join(home, ".local", "state")
