"""A fork whose parent ends at once, so that the launcher, a child subreaper, adopts it."""

from __future__ import annotations

import os
from typing import NamedTuple

from megatron_ft.ipc.wire import close_fds

__all__ = ["Begun", "begin_fork", "finish_fork"]

# as they are before anything stands in for them
_exit, _fork = os._exit, os.fork


class Begun(NamedTuple):
    """A process in between: it forks the one that is wanted, writes its number to a pipe, and ends."""

    pid: int
    read_fd: int


def begin_fork() -> Begun | None:
    """Begin; None in the new process.

    Raises:
        OSError: no process can be made.
    """
    read_fd, write_fd = os.pipe()
    try:
        between = _fork()
    except OSError:
        close_fds((read_fd, write_fd))
        raise
    if between != 0:
        os.close(write_fd)
        return Begun(between, read_fd)
    try:
        pid = _fork()
    except OSError:
        _exit(1)
    if pid != 0:
        try:
            os.write(write_fd, pid.to_bytes(4, "little"))
        finally:
            _exit(0)  # also if the server is gone, and nobody reads
    close_fds((read_fd, write_fd))
    return None


def finish_fork(begun: Begun) -> int:
    """The number of the process; the launcher is its parent from here on.

    Raises:
        OSError: it could not be made.
    """
    number = os.read(begun.read_fd, 4)
    os.close(begun.read_fd)
    os.waitpid(begun.pid, 0)
    if len(number) < 4:
        raise OSError("the process could not be forked")
    return int.from_bytes(number, "little")
