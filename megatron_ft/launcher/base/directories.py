"""Directories of a launcher: that of its sockets, and that of its event logs, which stays after the run.

The directory of the sockets is made at the launcher's start, recreated if it was deleted, removed at its end. A
launcher holds a lock on a file in it, which the process's end releases in any case. A directory whose lock is free is
a leftover of a launcher that was killed with all its monitors, or with its host: the next launcher removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megatron_ft.errors import ConfigError
from megatron_ft.link.wire import SOCKET_PATH_LIMIT

_PREFIX = "megatron_ft-"
_OWNER = "owner"
"""File in a run directory that is locked as long as its launcher lives."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_LONGEST_SOCKET_NAME = len("/monitor-99999.sock")


class _Socket(Protocol):
    """A socket in the run directory; ``listener`` is None unless it is open."""

    path: str
    listener: socket.socket | None

    def listen_again(self) -> None:
        """Recreate it where it was; OSError if that isn't possible. Connections stay open."""


class RunDirectory:
    """The directory of one launcher, locked so that no other one removes it as a leftover."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Create the directory.

        Raises:
            ConfigError: there is no place for it.
        """
        self.path = make_run_directory()
        self._say = say
        self._claim = claim(self.path)
        self.sockets: Sequence[_Socket] = ()
        """Sockets that ``mend`` recreates, too."""
        self._is_reported = False

    def mend(self) -> None:
        """Recreate deleted sockets: ranks that are still to connect would find no monitor."""
        lost = [each for each in self.sockets if each.listener is not None and not os.path.lexists(each.path)]
        if not lost:
            self._is_reported = False
            return
        try:
            # under the name that the ranks know: cleaners of /tmp remove it in long jobs
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            if not _is_private(os.lstat(self.path)):
                raise PermissionError(errno.EPERM, "something else has its name", self.path)
            held, self._claim = self._claim, claim(self.path)
            if held is not None:
                os.close(held)
            for each in lost:
                each.listen_again()
        except OSError as error:
            self._say_once(
                f"the socket directory can't be recreated ({error}): ranks that aren't connected yet will fail"
            )
        else:
            self._say_once(f"socket directory {self.path} was deleted: recreated")

    def _say_once(self, text: str) -> None:
        if not self._is_reported:
            self._say(text)
        self._is_reported = True

    def close(self) -> None:
        """Remove the directory with its content, if it is still there, and unlock it.

        Raises:
            OSError: the descriptor can't be closed.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # rmtree opens it, which a launcher without a free descriptor can't
            os.unlink(os.path.join(self.path, _OWNER))
            os.rmdir(self.path)
        held, self._claim = self._claim, None
        if held is not None:
            os.close(held)


def make_run_directory() -> str:
    """Make a private directory of an unpredictable name, short enough for sockets; remove those of dead launchers.

    XDG_RUNTIME_DIR isn't used, because it is removed when the user logs out, while the job goes on. Parent directories
    in which another user could rename it, and put something else in its place, are tried last.

    Raises:
        ConfigError: no place can be written.
    """
    tried = []
    bases = sorted(dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")), key=is_open_to_others)
    for base in bases:
        remove_leftovers(base)
    for base in bases:
        name_bytes = len(os.fsencode(os.path.join(base, f"{_PREFIX}12345678")))
        if name_bytes + _LONGEST_SOCKET_NAME > SOCKET_PATH_LIMIT:
            continue
        try:
            return tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
    raise ConfigError(f"no directory for sockets can be made ({'; '.join(tried)}); set TMPDIR")


def claim(run_dir: str) -> int | None:
    """Lock a run directory. Return a descriptor to close at the end; None where the file system has no locks.

    An unlocked directory is never removed as a leftover, and stays if its launcher is killed.
    """
    path = os.path.join(run_dir, _OWNER)
    fd = -1
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(_here()).encode())
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{path}.new", path)  # other processes can find it only from now on
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def remove_leftovers(place: str) -> None:
    """Remove this user's unlocked run directories in ``place``, as far as possible."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError, ValueError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    """Remove a leftover run directory. Raises OSError, ValueError: it is gone, or it isn't a run directory."""
    if not _is_private(entry.stat(follow_symlinks=False)):
        return
    fd = os.open(os.path.join(entry.path, _OWNER), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        host, boot = json.loads(os.read(fd, 4096))
        # a place may be shared by hosts that don't see each other's locks: directories of other hosts stay. After a
        # reboot the host's name is the same; another container on this host has the same boot id
        if host == _here()[0] or boot == _here()[1]:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)


def _is_private(status: os.stat_result) -> bool:
    """Return True for a directory of this user that no other user can read."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _here() -> list[str]:
    """Return this host's name and boot id."""
    with open(_BOOT_ID) as file:
        return [socket.gethostname(), file.read().strip()]


def is_open_to_others(path: str) -> bool:
    """Return True if another user (not root) may rename or remove this one's files there."""
    try:
        status = os.stat(path)
    except OSError:
        return True
    is_everybodys = bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return is_everybodys or status.st_uid not in (0, os.geteuid())


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
    for each in (*reversed(Path(path).parents), Path(path)):
        if not os.path.isdir(each):
            try:
                os.mkdir(each, mode if each == Path(path) else 0o755)
            except FileExistsError:
                if not os.path.isdir(each):  # otherwise another launcher has just made it
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
