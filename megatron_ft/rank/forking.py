"""Forks of a script that is run ahead: one that answers a question, and those that are to be ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from json import dumps, loads
from typing import Any

from megatron_ft.ipc.wire import close_fds

__all__ = ["ask_fork", "fork_orphans"]

# as they are before anything stands in for them
_exit, _fork = os._exit, os.fork


def ask_fork(question: Callable[[], Any]) -> Any:
    """What a fork of this process answers, in JSON. It ends then: whatever it has opened for that is gone, too.

    Raises:
        OSError: it has ended without an answer.
    """
    read_fd, write_fd = os.pipe()
    pid = _fork()
    if pid == 0:
        code = 1
        try:
            os.write(write_fd, dumps(question()).encode())
            code = 0
        finally:
            _exit(code)
    answer, code = _outcome(pid, read_fd, write_fd)
    if code != 0:
        raise OSError(f"a fork of it ended with {code}")
    return loads(answer)


def fork_orphans(count: int) -> int | list[int]:
    """Fork processes that the launcher, a child subreaper, adopts: a process in between forks them all, and ends.

    Returns in each of them its index, and here their numbers.

    Raises:
        OSError: not all could be made. Those that were wait to be told to go on like the others.
    """
    read_fd, write_fd = os.pipe()
    try:
        between = _fork()
    except OSError:
        close_fds((read_fd, write_fd))
        raise
    if between == 0:
        with contextlib.suppress(OSError):  # no more can be made; or the server is gone, and nobody reads
            for index in range(count):
                pid = _fork()
                if pid == 0:
                    close_fds((read_fd, write_fd))
                    return index
                os.write(write_fd, b"%d " % pid)
        _exit(0)
    pids = [int(number) for number in _outcome(between, read_fd, write_fd)[0].split()]
    if len(pids) < count:
        raise OSError(f"no more than {len(pids)} processes can be made")
    return pids


def _outcome(pid: int, read_fd: int, write_fd: int) -> tuple[bytes, int]:
    """What a child has written, and its exit code as ``subprocess`` has it, when it has ended."""
    os.close(write_fd)
    with open(read_fd, "rb") as file:
        written = file.read()
    return written, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
