"""NVIDIA's management library, asked which processes hold memory on a device. No CUDA context, no torch, no package.

The library comes with the driver; where it isn't there, there is nothing to ask.
"""

from __future__ import annotations

import ctypes
from typing import Any

from megatron_ft.core.device_memory import Holding

__all__ = ["holdings", "load"]

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
    try:
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:  # older than anything that CUDA still runs on
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        found: list[Holding] = []
        for index in range(count.value):
            found += _on_device(library, index) or []
        return found
    finally:
        library.nvmlShutdown()


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
