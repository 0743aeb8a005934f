"""What NVIDIA's driver tells of devices, and of processes that hold memory there. No CUDA context, no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_ft.link.base.process_facts import Holding

T = TypeVar("T")


def load() -> Any | None:
    """Return the module `pynvml`; None where the driver's library, which it needs, is not installed."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    import pynvml

    return pynvml


def holdings(pynvml: Any) -> list[Holding] | None:
    """Return the memory that processes hold on all visible devices; None if the driver doesn't tell.

    May take a second where nothing else keeps the driver awake. In a container with its own PID namespace the driver
    names no processes, or gives other numbers.
    """

    def ask(index: int, device: Any) -> list[Holding]:
        # not the name without a version: if the driver lacks the function, that one raises no NVMLError
        listed = _ask(pynvml, "nvmlDeviceGetComputeRunningProcesses_v3", device)
        return [Holding(index, each.pid, each.usedGpuMemory) for each in listed or []]

    return _on_devices(pynvml, ask)


def memory_problems(pynvml: Any) -> list[list[str]] | None:
    """Return what is wrong with the memory of each visible device; None if the driver doesn't tell."""

    def ask(index: int, device: Any) -> list[list[str]]:
        # retired pages are of older devices, remapped rows of newer ones: a device knows only one of them
        pages = _ask(pynvml, "nvmlDeviceGetRetiredPagesPendingStatus", device)
        _, _, pending, failed = _ask(pynvml, "nvmlDeviceGetRemappedRows", device) or (None,) * 4
        needs_reset = ["needs a reset: memory retirement or row remapping is pending"] if pages or pending else []
        return [[*needs_reset, *(["has a row remapping failure"] if failed else [])]]

    return _on_devices(pynvml, ask)


def _on_devices(pynvml: Any, ask: Callable[[int, Any], list[T]]) -> list[T] | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = _ask(pynvml, "nvmlDeviceGetCount")
        handles = [_ask(pynvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count or 0)]
        return (
            None if count is None else [found for index, handle in enumerate(handles) for found in ask(index, handle)]
        )
    finally:
        _ask(pynvml, "nvmlShutdown")


def _ask(pynvml: Any, name: str, *arguments: Any) -> Any:
    """Return the driver's answer; None if it has an error, or is too old for the question."""
    if None in arguments:
        return None  # of a device that the driver couldn't open
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError:
        return None
