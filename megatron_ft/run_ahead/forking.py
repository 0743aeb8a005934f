"""Forks of a fork server, adopted by its launcher, and the pages that make a fork fast."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator

_MADV_COLLAPSE = 25
_LARGE = 2 << 20
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$", re.MULTILINE)
_exit, _fork = os._exit, os.fork  # a module may replace them


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
    with contextlib.suppress(ChildProcessError):  # a module has told the kernel to reap children
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
