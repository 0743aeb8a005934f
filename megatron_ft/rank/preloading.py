"""Imports in a process that is to be forked, and what makes it unfit for that."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from megatron_ft.core.preload import IDENTITY_VARIABLES, LearnedImport, may_be_preloaded
from megatron_ft.ipc.installed import installed_roots
from megatron_ft.ipc.processes import OWN_THREADS, thread_count

__all__ = ["Preloaded", "Wanted", "import_all", "own_changes", "why_unfit"]

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


def import_all(
    wanted: Sequence[Wanted], on_begin: Callable[[str], None], expected: Mapping[str, str] | None = None
) -> Preloaded:
    """Import modules, and stop at the first one that makes this process unfit to be forked.

    Args:
        wanted: the modules; one without a file is the user's wish.
        on_begin: is told each name before its import, which may never come back.
        expected: where the ranks import from, by name, as far as they told: what others import must come from there.
    """
    failed: dict[str, str] = {}
    count = 0
    roots = tuple(installed_roots())
    places = {**(expected or {}), **{name: origin for name, origin in wanted if origin is not None}}
    for name, origin in wanted:
        if name in sys.modules:
            continue
        on_begin(name)
        before, files = set(sys.modules), _open_files()
        with _identity_watched() as read, _device_count_watched() as counted:
            try:
                with nullcontext() if origin is None else _warnings_unsaid():
                    importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                failed[name] = f"{type(error).__name__}: {error}"
        reason = _why_spoiled(read, counted) or _why_open(files)
        if reason is None and origin is not None:
            new = {new: found for new in sys.modules.keys() - before if (found := _origin(new)) is not None}
            reason = _why_elsewhere(new, places, roots)
        if reason is not None:
            return Preloaded(count, failed, name, reason)
        count += name not in failed
    return Preloaded(count, failed, None, "")


def _origin(name: str) -> str | None:
    """The file that a module came from; None where there is none, or it doesn't tell."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec.origin if spec is not None and spec.has_location else None


def _why_elsewhere(new: Mapping[str, str], expected: Mapping[str, str], roots: Sequence[str]) -> str | None:
    """Whether something was imported that the ranks import from elsewhere, or that is the user's own."""
    for name, found in new.items():
        if expected.get(name, found) != found:
            return f"the ranks import {name} from {expected[name]}, it came from {found}"
        if not may_be_preloaded(LearnedImport(name, found), roots):
            return f"it imports {name}, which isn't installed"
    return None


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed them
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _why_open(before: Mapping[str, str]) -> str | None:
    """What an import keeps open: a rank begins without it, and the number would soon be another file's."""
    new = [link for fd, link in _open_files().items() if before.get(fd) != link]
    if any(link.startswith("/dev/nvidia") for link in new):
        return "it touched CUDA"
    return f"it keeps {min(new)} open" if new else None


def why_unfit() -> str | None:
    """Why this process must not be forked to make ranks; None if it may.

    It is tried: libraries that mind forks (OpenBLAS) end their threads before one, so threads are counted after.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a daemon's
            stream.flush()
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


def own_changes(before: Mapping[str, str]) -> dict[str, str | None]:
    """What imports did to the environment since ``before``: name to value, None for one that they removed."""
    now = dict(os.environ)
    return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def _why_spoiled(read: set[str], counted: list[bool]) -> str | None:
    if read:
        return f"it reads {min(read)} while it is imported"
    if counted or touches_cuda():
        return "it touched CUDA"
    if len(os.listdir(OWN_THREADS)) > 1:
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
def _warnings_unsaid() -> Iterator[None]:
    """Keeps Python's warnings back meanwhile: the ranks, whose imports these were, have heard them, and chosen which.

    Filters that a module sets stay, so ``warnings.catch_warnings`` won't do.
    """
    muted = True
    original = warnings.showwarning

    def show(*args: Any, **kwargs: Any) -> None:
        if not muted:  # somebody has kept it, and calls it later
            original(*args, **kwargs)

    warnings.showwarning = show
    try:
        yield
    finally:
        muted = False
        if warnings.showwarning is show:
            warnings.showwarning = original


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


@contextmanager
def _device_count_watched() -> Iterator[list[bool]]:
    """Collects whether CUDA is asked for its devices meanwhile: torch then refuses CUDA to all forks."""
    counted: list[bool] = []
    c_extension: Any = sys.modules.get("torch._C")
    original = getattr(c_extension, "_cuda_getDeviceCount", None)
    if original is None:
        yield counted
        return

    def count_devices() -> Any:
        counted.append(True)
        return original()

    c_extension._cuda_getDeviceCount = count_devices
    try:
        yield counted
    finally:
        c_extension._cuda_getDeviceCount = original
