"""NVIDIA's management library: devices, and processes that hold memory there. No CUDA context, no torch.

The library comes with the driver; without it there is nothing to ask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_ft.core.device_memory import Holding
from megatron_ft.core.node_health import Gpu

T = TypeVar("T")
_LIBRARY = "libnvidia-ml.so.1"
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_NOT_TOLD = 2**64 - 1
_ROOM = 64
_TRIES = 3


class _OldProcess(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (*_OldProcess._fields_, ("instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))


def load() -> Any | None:
    """Load the library; None where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def holdings(library: Any) -> list[Holding] | None:
    """Return the memory that processes hold on all visible devices; None if the driver doesn't tell.

    May take a second where nothing else keeps the driver awake. In a container with its own PID namespace the driver
    names no processes, or gives other numbers.
    """
    return _with_devices(library, lambda index: _on_device(library, index) or [])


def gpus(library: Any) -> list[Gpu] | None:
    """Return all visible devices, and whether their memory is sound; None if the driver doesn't tell."""
    return _with_devices(library, lambda index: [_gpu(library, index)])


def _with_devices(library: Any, ask: Callable[[int], list[T]]) -> list[T] | None:
    try:
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:  # older than any driver that CUDA still runs on
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [found for index in range(count.value) for found in ask(index)]
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> Gpu:
    """Ask for retired pages (older devices) and remapped rows (newer ones); a device knows only one of them."""
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return Gpu(index=index)
    pages = ctypes.c_uint()
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    has_pages = _asked(library, "nvmlDeviceGetRetiredPagesPendingStatus", device, ctypes.byref(pages))
    has_rows = _asked(library, "nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows))
    return Gpu(
        index=index,
        pages_pending=bool(pages.value) if has_pages else None,
        rows_pending=bool(rows[2].value) if has_rows else None,
        rows_failed=bool(rows[3].value) if has_rows else None,
    )


def _asked(library: Any, name: str, *arguments: Any) -> bool:
    """Return True if the library answered."""
    try:
        return bool(getattr(library, name)(*arguments) == 0)
    except AttributeError:
        return False


def _on_device(library: Any, index: int) -> list[Holding] | None:
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return None
    ask, kind = _question(library)
    room = _ROOM
    for _ in range(_TRIES):
        listed = (kind * room)()
        count = ctypes.c_uint(room)
        code = ask(device, ctypes.byref(count), listed)
        if code == 0:
            return [
                Holding(index, int(each.pid), None if each.used == _NOT_TOLD else int(each.used))
                for each in listed[: count.value]
            ]
        if code != _TOO_SMALL:
            return None
        room = 2 * max(room, count.value)
    return None


def _question(library: Any) -> tuple[Any, type[ctypes.Structure]]:
    """Return the newest function of the driver and its structure; newer ones fill in more fields."""
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        if hasattr(library, name):
            return getattr(library, name), _Process
    return library.nvmlDeviceGetComputeRunningProcesses, _OldProcess
