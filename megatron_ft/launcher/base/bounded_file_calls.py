"""Bounded file calls of the launcher under its log directories: a stuck file server must not block it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_ft.ipc.files.file_thread import FileThread

_READ_S = 0.2
_COPY_S = 0.5
"""Longest wait for a copy in progress; torch copies every 0.1 s."""
_LAST_COPY_S = 5.0

T = TypeVar("T")
_files = FileThread()
_copiers = FileThread()


def call(job: Callable[[], T], default: T, *, bound_s: float = _READ_S) -> T:
    """Run a file operation. Return the default if it takes too long, or an earlier one still does.

    Raises:
        any exception of the job.
    """
    return _files.call(job, default, bound_s=bound_s)


def copying_ends(stop: Callable[[], object]) -> None:
    """Run ``stop``, which waits until the ranks' output files are copied to the launcher's output.

    The launcher waits only for a moment: while the directory doesn't answer, copying doesn't end.
    """
    _copiers.do(stop)
    _copiers.wait(max(0.0, _COPY_S - _copiers.stands_for_s()))


def are_copied() -> bool:
    """Wait, at the launcher's end, until all is copied. Return False if some output stays in the ranks' files only."""
    return _copiers.wait(max(0.0, _LAST_COPY_S - _copiers.stands_for_s()))
