"""Imports in a process that is to be forked, and what makes it unfit for that."""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_ft.core.preload import IDENTITY_VARIABLES

__all__ = ["Preloaded", "Wanted", "import_all", "own_changes", "why_unfit"]

_THREADS = "/proc/self/task"
_UNFIT_EXIT = 3


class Wanted(NamedTuple):
    """A module, and the file that it must come from; None is any."""

    name: str
    origin: str | None = None


class Preloaded(NamedTuple):
    """What became of a list of modules."""

    imported: int
    failed: dict[str, str]
    """Name to reason; the process is none the worse for them."""
    spoiled_by: str | None
    """The module after which this process is unfit to be forked."""
    reason: str


def import_all(wanted: Sequence[Wanted], on_begin: Callable[[str], None]) -> Preloaded:
    """Import modules, and stop at the first one that makes this process unfit to be forked.

    ``on_begin`` is told each name before its import, which may never come back.
    """
    failed: dict[str, str] = {}
    count = 0
    for name, origin in wanted:
        if name in sys.modules:
            continue
        on_begin(name)
        with _identity_watched() as read:
            try:
                module = importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                failed[name] = f"{type(error).__name__}: {error}"
                module = None
        reason = _why_spoiled(read)
        found = getattr(getattr(module, "__spec__", None), "origin", None)
        if reason is None and module is not None and origin is not None and found != origin:
            reason = f"the ranks import it from {origin}, it came from {found}"
        if reason is not None:
            return Preloaded(count, failed, name, reason)
        count += module is not None
    return Preloaded(count, failed, None, "")


def why_unfit() -> str | None:
    """Why this process must not be forked to make ranks; None if it may.

    It is tried: libraries that mind forks (OpenBLAS) end their threads before one, so threads are counted after.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads that end before the fork
        pid = os.fork()
    if pid == 0:
        os._exit(_UNFIT_EXIT if _is_bad_fork() else 0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        return "it touched CUDA" if status == _UNFIT_EXIT else f"a forked child ended with {status}"
    if thread_count() > 1:
        return "it started a thread"
    return None


def thread_count() -> int:
    """Threads of this process, those of C libraries included. One that has just ended is given a moment to go."""
    for _ in range(20):
        count = len(os.listdir(_THREADS))
        if count == 1:
            break
        time.sleep(0.001)
    return count


def own_changes(before: Mapping[str, str]) -> dict[str, str | None]:
    """What imports did to the environment since ``before``: name to value, None for one that they removed."""
    now = dict(os.environ)
    return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def _why_spoiled(read: set[str]) -> str | None:
    if read:
        return f"it reads {min(read)} while it is imported"
    if touches_cuda():
        return "it touched CUDA"
    if len(os.listdir(_THREADS)) > 1:
        return why_unfit()
    return None


def touches_cuda() -> bool:
    """Whether this process holds a CUDA context, which no fork survives."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(getattr(cuda, "_initialized", False) or cuda.is_initialized())


def _is_bad_fork() -> bool:
    cuda: Any = sys.modules.get("torch.cuda")
    is_bad = getattr(cuda, "_is_in_bad_fork", None)
    return touches_cuda() or bool(is_bad is not None and is_bad())


@contextmanager
def _identity_watched() -> Iterator[set[str]]:
    """Collects which of the variables that tell ranks apart are read meanwhile."""
    read: set[str] = set()

    class Watched(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            if name in IDENTITY_VARIABLES:
                read.add(name)
            value: str = super().__getitem__(name)
            return value

    original = type(os.environ)
    os.environ.__class__ = Watched
    try:
        yield read
    finally:
        os.environ.__class__ = original
