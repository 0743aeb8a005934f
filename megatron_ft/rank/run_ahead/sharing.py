"""Checks whether a process can be forked into ranks, and separates what ranks must not share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron_ft.ipc.linux.processes import thread_count
from megatron_ft.rank.run_ahead.forking import ask_fork

_SHARED_MEMORY = re.compile(r"^\S+ .w.s \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

Identity = tuple[int, int]
"""Device and inode of a file."""


def why_not_shared(own: set[int], given: set[Identity]) -> str | None:
    """Return what this process has that no fork of it may share, None if nothing. ``own`` descriptors are this
    package's.

    ``given``: standard input, and the files that stand for the ranks' streams.
    """
    return _why_child() or _why_threads() or _why_open(own, given) or _why_memory()


def _why_child() -> str | None:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "the script has a child process"


def _why_threads() -> str | None:
    """Count threads after a fork: libraries with fork handlers (OpenBLAS) end their threads before one."""
    try:
        if ask_fork(_has_cuda):
            return "the script has initialised CUDA"
    except OSError as error:
        return str(error)
    return "the script has a thread of a C library" if thread_count() > 1 else None


def _has_cuda() -> bool:
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized() or cuda._is_in_bad_fork())


def _why_open(own: set[int], given: set[Identity]) -> str | None:
    for fd, (link, flags) in descriptors(own).items():
        mode = os.fstat(fd).st_mode
        if identity(fd) in given or stat.S_ISDIR(mode) or link in _HARMLESS_DEVICES:
            continue
        if not stat.S_ISREG(mode) or link.startswith("/memfd:"):
            return f"the script has {link} open"
        if flags & os.O_ACCMODE != os.O_RDONLY:
            return f"the script has {link} open for writing"
    return None


def _why_memory() -> str | None:
    with open("/proc/self/maps", errors="surrogateescape") as file:
        found = _SHARED_MEMORY.search(file.read())
    return None if found is None else f"the script has shared memory ({found[1] or 'anonymous'})"


def identity(fd: int) -> Identity:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def take_over(script: Collection[int], given: set[Identity], captured: Sequence[int], streams: Sequence[int]) -> None:
    """Keep the ``script``'s descriptors in a rank, and close all others.

    Output captured in files is copied to the ``streams`` they stand for, and later output goes there, under whatever
    number. Files open for reading, except ``given`` ones, are opened again at their position.
    """
    # one entry where both streams are one file, which is in the right order
    streams_of = {identity(file): (file, stream) for file, stream in zip(captured, streams, strict=True)}
    for file, stream in streams_of.values():
        position, size = 0, os.fstat(file).st_size
        with contextlib.suppress(OSError):  # its reader has gone
            while position < size:
                position += os.write(stream, os.pread(file, 1 << 16, position))
    for fd in script:
        with contextlib.suppress(OSError, KeyError):  # the script has closed it; or it is another file
            os.dup2(streams_of[identity(fd)][1], fd, os.get_inheritable(fd))
    for fd in descriptors(script):
        os.close(fd)
    for fd, (link, flags) in descriptors().items():
        if link in _HARMLESS_DEVICES or flags & os.O_ACCMODE != os.O_RDONLY or identity(fd) in given:
            continue
        with contextlib.suppress(OSError):  # opening it is no longer permitted
            position = os.lseek(fd, 0, os.SEEK_CUR)
            anew = os.open(f"/proc/self/fd/{fd}", flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC) | os.O_CLOEXEC)
            os.lseek(anew, position, os.SEEK_SET)
            os.dup2(anew, fd, os.get_inheritable(fd))
            os.close(anew)


def descriptors(without: Iterable[int] = ()) -> dict[int, tuple[str, int]]:
    """Return open descriptors except ``without``, each with its target and flags."""
    found = {}
    for fd in sorted(set(map(int, os.listdir("/proc/self/fd"))).difference(without)):
        with contextlib.suppress(OSError):  # the descriptor that listed them
            found[fd] = os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL)
    return found
