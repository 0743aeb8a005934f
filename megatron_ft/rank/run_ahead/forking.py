"""Forks of a script that is run ahead: one that answers a question, and those that are to be ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from json import dumps, loads
from typing import Any

__all__ = ["ask_fork", "fork_orphans"]

# as they are before anything stands in for them
_exit, _fork = os._exit, os.fork


def ask_fork(question: Callable[[], Any]) -> Any:
    """What a fork of this process answers, in JSON. It ends then: whatever it has opened for that is gone, too.

    Raises:
        OSError: it has ended without an answer.
    """
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answers, open(write_fd, "wb", buffering=0) as answering:
        pid = _fork()
        if pid == 0:
            code = 1
            try:
                answering.write(dumps(question()).encode())
                code = 0
            finally:
                _exit(code)
        answering.close()
        answer = answers.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise OSError(f"a fork of it ended with {code}")
    return loads(answer)


def fork_orphans(count: int) -> int | list[int]:
    """Fork processes that the launcher, a child subreaper, adopts: a process in between forks them all, and ends.

    Returns in each of them its index, and here their numbers.

    Raises:
        OSError: not all could be forked. Those that were wait for the order to go on, like the others.
    """
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as numbers, open(write_fd, "wb", buffering=0) as telling:
        between = _fork()
        if between == 0:
            with contextlib.suppress(OSError):  # no more can be forked; or the server has ended, and nothing reads this
                for index in range(count):
                    pid = _fork()
                    if pid == 0:
                        return index
                    telling.write(b"%d " % pid)
            _exit(0)
        telling.close()
        pids = [int(number) for number in numbers.read().split()]
    os.waitpid(between, 0)
    if len(pids) < count:
        raise OSError(f"no more than {len(pids)} processes can be made")
    return pids
