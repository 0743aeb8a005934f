"""Memory in large pages, so that forking is fast: a fork copies a table entry for each page, and does little else.

A process that has imported torch and Megatron has 70,000 small pages, and its fork takes 10 ms and its end as long;
in large ones it takes one. Linux 6.1 and later can be asked for that, whatever its settings are; others refuse, and
all stays as it is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

__all__ = ["collapse_memory"]

_MADV_COLLAPSE = 25
_LARGE = 2 << 20
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(?:\[heap\])?$", re.MULTILINE)


def collapse_memory() -> Iterator[None]:
    """Collapse this process's own memory, one large page at each step, each of which takes about a millisecond."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        regions = [(int(low, 16), int(high, 16)) for low, high in _PRIVATE.findall(file.read())]
    refused = 0
    for low, high in regions:
        for start in range(-(-low // _LARGE) * _LARGE, high - _LARGE + 1, _LARGE):
            # a region that isn't in use is refused, too; a kernel that refuses all isn't asked again and again
            refused = refused + 1 if libc.madvise(start, _LARGE, _MADV_COLLAPSE) != 0 else 0
            if refused > 100:
                return
            yield
