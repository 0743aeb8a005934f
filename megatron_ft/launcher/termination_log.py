"""Kubernetes shows what a container has written to ``/dev/termination-log``: why it ended, in a sentence."""

from __future__ import annotations

from megatron_ft.core.wording import printable
from megatron_ft.launcher.base import bounded_file_calls
from megatron_ft.launcher.result_file import End

__all__ = ["PATH", "tell"]

PATH = "/dev/termination-log"
_MOST_BYTES = 4000
"""Of 4096 that Kubernetes reads."""


def tell(end: End, *, path: str = PATH) -> None:
    """Write it, where there is such a file."""
    if end.ending is None:
        return
    text = end.ending.value.replace("_", " ") + (f": {end.cause}" if end.cause else "")
    bounded_file_calls.call(lambda: _write(path, printable(text)), None)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "r+b") as file:  # made by Kubernetes, and only to be written in place
            file.truncate()
            file.write(text.encode(errors="replace")[:_MOST_BYTES])
    except OSError:
        pass  # another path is configured, or none
