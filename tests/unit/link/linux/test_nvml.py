"""What the driver is asked, and what becomes of its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

from megatron_ft.link.base.process_facts import Holding
from megatron_ft.link.linux import nvml

DEVICES = {
    "nvmlDeviceGetComputeRunningProcesses_v3": [
        [SimpleNamespace(pid=7, usedGpuMemory=3 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)],
        [SimpleNamespace(pid=9, usedGpuMemory=0)],
        [],
    ],
    "nvmlDeviceGetRetiredPagesPendingStatus": [1, None, None],
    "nvmlDeviceGetRemappedRows": [None, (9, 1, 0, 1), None],
}
"""Answers for an older device, a newer one and one without processes; None raises an error."""


class Driver:
    """The module `pynvml` on a node with `DEVICES`."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            assert name == "nvmlInit" or self.open
            if name in self.broken:
                raise self.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetCount":
                return 3
            if name == "nvmlDeviceGetHandleByIndex":
                return f"device {arguments[0]}"
            if name not in DEVICES:
                return None
            found = DEVICES[name][int(arguments[0].removeprefix("device "))]
            if found is None:
                raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return found

        assert callable(getattr(pynvml, name))
        return answer


def test_all_devices_are_asked_for_processes_and_the_state_of_their_memory() -> None:
    driver = Driver()
    assert nvml.holdings(driver) == [Holding(0, 7, 3 << 30), Holding(0, 8, None), Holding(1, 9, 0)]
    old, new, other = nvml.memory_problems(driver) or []
    assert old == ["needs a reset: memory retirement or row remapping is pending"]
    assert (new, other) == (["has a row remapping failure"], [])
    assert driver.open == 0


def test_a_driver_with_an_error_tells_nothing() -> None:
    for broken in ("nvmlInit", "nvmlDeviceGetCount"):
        driver = Driver(broken)
        assert not nvml.holdings(driver)
        assert nvml.memory_problems(driver) is None
        assert driver.open == 0  # what didn't open isn't closed
