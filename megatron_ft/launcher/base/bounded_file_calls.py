"""What the launcher reads and makes under its log directories: it waits for a file server with a bound only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_ft.ipc.files.file_thread import FileThread

_READ_S = 0.2
_COPY_S = 0.5
"""torch copies what there is every 0.1 s."""
_LAST_COPY_S = 5.0

T = TypeVar("T")
_files = FileThread()
_copiers = FileThread()


def call(job: Callable[[], T], default: T, *, bound_s: float = _READ_S) -> T:
    """Do something with files; the default if that takes too long, or an earlier one still does.

    Raises:
        whatever the job raises.
    """
    return _files.call(job, default, bound_s=bound_s)


def copying_ends(stop: Callable[[], object]) -> None:
    """Run ``stop``, which waits until what the ranks wrote to their files is copied to the launcher's output.

    The launcher waits no longer than a moment: while the directory doesn't answer, copying doesn't end.
    """
    _copiers.do(stop)
    _copiers.wait(max(0.0, _COPY_S - _copiers.stands_for_s()))


def are_copied() -> bool:
    """At the launcher's end: whether all is copied. What isn't after some seconds is in the ranks' files only."""
    return _copiers.wait(max(0.0, _LAST_COPY_S - _copiers.stands_for_s()))
