"""Set-up of this package's processes: interpreter, name, parent and limit of open files.

A launcher has some descriptors for each rank, and one for each connection to a store that serves all nodes: the usual
1024 are used up at a thousand nodes. So launchers and coordinators raise their limit. A program that uses select()
fails beyond 1024, so other processes that a launcher starts, ranks included, get its original limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

import msgspec

import megatron_ft

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_PR_SET_CHILD_SUBREAPER = 36
# loaded at import: die_with_parent runs between fork and exec, where nothing may be loaded
_libc = ctypes.CDLL(None, use_errno=True)
_BOOT = "import sys; sys.path += sys.argv.pop(1).splitlines(); from {}.__main__ import main; sys.exit(main())"
_limit_before: tuple[int, int] | None = None


def isolated_command(package: str) -> list[str]:
    """Return the command that runs ``main`` of a package (``megatron_ft.monitor``) in a new interpreter.

    Isolated (-I) and without site (-S): the user's PYTHONPATH, a file named json.py in the working directory, and
    imports of .pth files have no effect. The standard library comes first; after it, what is installed beside this
    package, or beside msgspec where the two are apart.
    """
    above = (os.path.dirname(os.path.abspath(each.__path__[0])) for each in (megatron_ft, msgspec))
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(package), "\n".join(dict.fromkeys(above))]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the *thread* that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on_without_parent() -> None:
    """Ask the kernel to send SIGCONT to this process when the thread that made it ends, in case it is stopped then."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def become_subreaper() -> None:
    """Adopt orphans below this process, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: bytes) -> bytes:
    """Set the process name that the kernel and ps show. Return the former one."""
    before = ctypes.create_string_buffer(16)
    _libc.prctl(_PR_GET_NAME, before, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
    return before.value


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, if the system permits it."""
    global _limit_before
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limit_before = None
    if limits[0] != limits[1]:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            _limit_before = limits


def soft_limit_before() -> int | None:
    """Return the soft limit before it was raised; None if it never was."""
    return None if _limit_before is None else _limit_before[0]


def restore_file_limit(pid: int = 0) -> None:
    """Undo ``raise_file_limit`` in this process, or in a child that has just been started, if that lives.

    Descriptors above the limit stay open.
    """
    if _limit_before is not None:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _limit_before)
