"""Run directories of launchers that were killed with all their monitors, or with their host: the next one removes them.

A launcher holds a lock on a file in its run directory. The lock goes with the process, however that ends, so one that
can be taken belongs to a launcher that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat

__all__ = ["OWNER", "claim", "remove_leftovers"]

OWNER = "owner"
"""The file in a run directory that is locked as long as its launcher lives."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def claim(run_dir: str) -> int | None:
    """Hold a run directory: a descriptor to close at the end. None where the file system has no locks.

    Such a directory is never removed as a leftover, and stays if its launcher is killed.
    """
    path = os.path.join(run_dir, OWNER)
    fd = -1
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(_here()).encode())
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{path}.new", path)  # only from now on can other processes find it
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def remove_leftovers(place: str, prefix: str) -> None:
    """Remove this user's run directories in ``place`` that no process holds any more. What can't be removed stays."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError, ValueError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    """Raises OSError, ValueError: it isn't there any more, or it isn't a run directory."""
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return
    fd = os.open(os.path.join(entry.path, OWNER), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        host, boot = json.loads(os.read(fd, 4096))
        # a place may be shared by hosts that don't see each other's locks: those of another host stay. A host that was
        # started again has its name, another container on this host has its kernel
        if host == _here()[0] or boot == _here()[1]:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)


def _here() -> list[str]:
    """The names of this host, and of its kernel since it was started."""
    with open(_BOOT_ID) as file:
        return [socket.gethostname(), file.read().strip()]
