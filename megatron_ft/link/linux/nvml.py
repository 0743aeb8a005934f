"""What NVIDIA's driver tells of devices, and of processes that hold memory there. No CUDA context, no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_ft.link.base.device_memory import Holding
from megatron_ft.link.base.node_problems import Gpu

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


def gpus(pynvml: Any) -> list[Gpu] | None:
    """Return all visible devices, and whether their memory is sound; None if the driver doesn't tell."""

    def ask(index: int, device: Any) -> list[Gpu]:
        # retired pages are of older devices, remapped rows of newer ones: a device knows only one of them
        pages = _ask(pynvml, "nvmlDeviceGetRetiredPagesPendingStatus", device)
        _, _, pending, failed = _ask(pynvml, "nvmlDeviceGetRemappedRows", device) or (None,) * 4
        told = [None if each is None else bool(each) for each in (pages, pending, failed)]
        return [Gpu(index=index, pages_pending=told[0], rows_pending=told[1], rows_failed=told[2])]

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
