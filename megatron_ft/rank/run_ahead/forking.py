"""Forks of a script that is run ahead: one that answers a question, those that become ranks, and how to fork fast."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from json import dumps, loads
from typing import Any

# as they are before anything stands in for them
_exit, _fork = os._exit, os.fork

_MADV_COLLAPSE = 25
_LARGE = 2 << 20
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$", re.MULTILINE)


def fork_point() -> None:
    """Say that what follows belongs to one rank, in one cycle: ``ft_launcher`` forks the ranks here at the latest.

    Wherever the script isn't run ahead, this does nothing.
    """
    run_ahead = sys.modules.get("megatron_ft.rank.run_ahead.script")
    if run_ahead is not None:
        run_ahead.stop("calls fork_point()")


def ask_fork(question: Callable[[], Any]) -> Any:
    """What a fork of this process answers, in JSON. The fork then ends, and with it all that it opened.

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


def collapse_memory() -> Iterator[None]:
    """Put this process's own memory into large pages, one at each step, which takes about a millisecond.

    A fork copies a table entry for each page, and does little else. A process that has imported torch and Megatron has
    70,000 small pages: its fork takes 10 ms, and its end as long; in large pages it takes one. Linux 6.1 and later do
    it on request, whatever their settings are; others refuse, and all stays as it is.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps", errors="surrogateescape") as file:
        regions = [(int(low, 16), int(high, 16)) for low, high in _PRIVATE.findall(file.read())]
    refused = 0
    for low, high in regions:
        for start in range(-(-low // _LARGE) * _LARGE, high - _LARGE + 1, _LARGE):
            # a region that isn't in use is refused, too; a kernel that refuses all isn't asked again and again
            refused = refused + 1 if libc.madvise(start, _LARGE, _MADV_COLLAPSE) != 0 else 0
            if refused > 100:
                return
            yield
