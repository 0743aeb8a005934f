"""Helpers of nvidia-resiliency-ext that scripts and its own tests import, and that this package doesn't use itself."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from typing import Any

from megatron_ft.link.linux.processes import read_stat


def is_module_available(module: str) -> bool:
    """Return True if the module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def is_process_alive(pid: int) -> bool:
    """Return True if the process is alive; a zombie isn't."""
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def wait_for_mp_events(events: Iterable[Any], timeout: float = 60) -> None:
    """Wait until all of these events of ``multiprocessing`` are set.

    Raises:
        RuntimeError: an event isn't set after ``timeout`` seconds in all.
    """
    deadline = time.monotonic() + timeout
    for event in events:
        if not event.wait(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"an event wasn't set in {timeout:g} s")
