"""Forks of a script that is run ahead: to answer a question, and to become ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from json import dumps, loads
from typing import Any

# the originals, before they are replaced
_exit, _fork = os._exit, os.fork

_MADV_COLLAPSE = 25
_LARGE = 2 << 20
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$", re.MULTILINE)


def fork_point() -> None:
    """Mark the point from which the script belongs to one rank; ``ft_launcher`` forks the ranks here at the latest.

    Does nothing in a script that isn't run ahead.
    """
    run_ahead = sys.modules.get("megatron_ft.rank.run_ahead.script")
    if run_ahead is not None:
        run_ahead.stop("calls fork_point()")


def ask_fork(question: Callable[[], Any]) -> Any:
    """Return the answer of a fork of this process, passed as JSON. The fork then ends, with everything it opened.

    Raises:
        OSError: the fork ended without an answer.
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
    """Fork processes for the launcher, a child subreaper, to adopt: an intermediate process forks them, and ends.

    Returns the index in each new process, and the list of PIDs here.

    Raises:
        OSError: not all could be forked. Those that were forked wait for the order to go on.
    """
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as numbers, open(write_fd, "wb", buffering=0) as telling:
        between = _fork()
        if between == 0:
            # no more forks possible; or the server has ended, and nothing reads this
            with contextlib.suppress(OSError):
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


def collapse_memory() -> Iterator[None]:
    """Move this process's private memory to large pages; each step of the iterator takes about a millisecond.

    A fork mainly copies a table entry per page. A process that has imported torch and Megatron has 70,000 small pages:
    its fork takes 10 ms, and its end as long; with large pages 1 ms. Linux 6.1 and later do it on request, whatever
    their settings are; others refuse, and nothing changes.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps", errors="surrogateescape") as file:
        regions = [(int(low, 16), int(high, 16)) for low, high in _PRIVATE.findall(file.read())]
    refused = 0
    for low, high in regions:
        for start in range(-(-low // _LARGE) * _LARGE, high - _LARGE + 1, _LARGE):
            # an unused region is refused, too; give up on a kernel that refuses all
            refused = refused + 1 if libc.madvise(start, _LARGE, _MADV_COLLAPSE) != 0 else 0
            if refused > 100:
                return
            yield
