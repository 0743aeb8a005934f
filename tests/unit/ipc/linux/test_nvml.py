"""What the driver's library is asked, and what becomes of its answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from megatron_ft.core.device_memory import Holding
from megatron_ft.core.node_health import Gpu
from megatron_ft.ipc.linux import nvml

HELD = Holding(0, 7, 3 << 30)


class Library:
    """What the driver's library does, for two devices. ``listed``: (process, bytes), by device."""

    def __init__(self, *listed: list[tuple[int, int]], broken: str = "") -> None:
        self.listed = listed
        self.broken = broken
        self.open = 0
        self.rooms: list[int] = []

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return int(self.broken == "init")

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.listed)
        return int(self.broken == "count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        device._obj.value = index.value + 1
        return int(self.broken == "handle")

    def answer(self, device: Any, count: Any, processes: Any) -> int:
        listed, room = self.listed[device.value - 1], count._obj.value
        self.rooms.append(room)
        assert room == len(processes)
        count._obj.value = len(listed)
        if len(listed) > room:
            return 7
        for process, (pid, used) in zip(processes, listed, strict=False):
            process.pid, process.used = pid, used
        return 9 if self.broken == "processes" else 0


class Old(Library):
    nvmlDeviceGetComputeRunningProcesses = Library.answer  # noqa: N815


class New(Library):
    nvmlDeviceGetComputeRunningProcesses = None  # noqa: N815
    nvmlDeviceGetComputeRunningProcesses_v3 = Library.answer  # noqa: N815


@pytest.mark.parametrize("kind", [Old, New])
def test_the_driver_is_asked_for_all_devices(kind: type[Library]) -> None:
    library = kind([(7, 3 << 30), (8, 2**64 - 1)], [], [(9, 0)])
    assert nvml.holdings(library) == [HELD, Holding(0, 8, None), Holding(2, 9, 0)]
    assert library.open == 0


def test_process_list_longer_than_expected_is_asked_for_again() -> None:
    library = New([(pid, 1) for pid in range(100)])
    found = nvml.holdings(library)
    assert found is not None
    assert [each.pid for each in found] == list(range(100))
    assert len(library.rooms) == 2


@pytest.mark.parametrize("broken", ["init", "count", "handle", "processes"])
def test_a_driver_with_an_error_tells_nothing(broken: str) -> None:
    library = New([(7, 1)], broken=broken)
    assert not nvml.holdings(library)
    assert library.open == (1 if broken == "init" else 0)  # what didn't open isn't closed


def test_records_of_the_driver_have_the_layout_of_its_header() -> None:
    # nvmlProcessInfo_v1_t and nvmlProcessInfo_t of nvml.h
    assert ctypes.sizeof(nvml._OldProcess) == 16
    assert ctypes.sizeof(nvml._Process) == 24
    assert (nvml._Process.used.offset, nvml._Process.instance.offset) == (8, 16)  # type: ignore[attr-defined]


class Driver:
    """Of two devices: an older one with pages to retire, and a newer one with rows."""

    def __getattr__(self, name: str) -> Any:
        known = {
            "nvmlInit_v2": lambda: 0,
            "nvmlShutdown": lambda: 0,
            "nvmlDeviceGetCount_v2": lambda count: _set(0, count, 2),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, device: _set(0, device, index.value + 1),
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda device, pages: _set(_ONLY[device.value == 1], pages, 1),
            "nvmlDeviceGetRemappedRows": lambda device, corrected, uncorrected, pending, failed: _set(
                _set(_set(_set(_ONLY[device.value == 2], corrected, 9), uncorrected, 1), pending, 0), failed, 1
            ),
        }
        if name not in known:
            raise AttributeError(name)
        return known[name]


_ONLY = {True: 0, False: 3}
"""What the driver answers: 3 is that the device knows nothing of it."""


def _set(code: int, reference: Any, value: int) -> int:
    reference._obj.value = value
    return code


def test_the_driver_is_asked_for_what_each_device_knows() -> None:
    old, new = nvml.gpus(Driver()) or []
    assert old == Gpu(index=0, pages_pending=True)
    assert new == Gpu(index=1, rows_pending=False, rows_failed=True)
    assert nvml.gpus(object()) is None
