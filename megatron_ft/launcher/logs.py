"""What the launcher reads and makes under its log directories: it waits for a file server with a bound only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_ft.ipc.file_thread import FileThread

__all__ = ["call"]

_READ_S = 0.2

T = TypeVar("T")
_files = FileThread()


def call(job: Callable[[], T], default: T, *, bound_s: float = _READ_S) -> T:
    """Do something with files; the default if that takes too long, or an earlier one still does.

    Raises:
        whatever the job raises.
    """
    return _files.call(job, default, bound_s=bound_s)
