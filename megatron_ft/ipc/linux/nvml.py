"""NVIDIA's management library, asked of devices and who holds memory there. No CUDA context, no torch, no package.

The library comes with the driver; where it isn't there, there is nothing to ask.
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
    """The library; None where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def holdings(library: Any) -> list[Holding] | None:
    """What all processes hold on all devices that this one may see; None if the driver doesn't tell.

    May take a second where nothing else keeps the driver awake. In a container that has a numbering of processes of
    its own the driver names none, or them by other numbers.
    """
    return _with_devices(library, lambda index: _on_device(library, index) or [])


def gpus(library: Any) -> list[Gpu] | None:
    """All devices that this process may see, and whether their memory is sound; None if the driver doesn't tell."""
    return _with_devices(library, lambda index: [_gpu(library, index)])


def _with_devices(library: Any, ask: Callable[[int], list[T]]) -> list[T] | None:
    try:
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:  # older than anything that CUDA still runs on
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [found for index in range(count.value) for found in ask(index)]
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> Gpu:
    """Older devices retire pages, newer ones replace rows; each doesn't know of the other."""
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
    """Whether it was answered."""
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
    """Newer drivers fill in more fields, and keep the older function for those who don't know them."""
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        if hasattr(library, name):
            return getattr(library, name), _Process
    return library.nvmlDeviceGetComputeRunningProcesses, _OldProcess
