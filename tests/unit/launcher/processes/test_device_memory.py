"""New ranks wait for the device memory of those that have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ft.launcher.processes import device_memory_wait
from megatron_ft.launcher.processes.device_memory_wait import DeviceMemoryWait
from megatron_ft.link.base.process_facts import Holding
from megatron_ft.link.linux import nvml
from megatron_ft.link.reactor import Reactor
from megatron_ft.records.event_log import NullEventLog

HELD = Holding(0, 7, 3 << 30)


class Waiting:
    """A ``DeviceMemoryWait`` with a driver of our own."""

    def __init__(self, query: Callable[[], list[Holding] | None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "load", self._load)
        monkeypatch.setattr(nvml, "holdings", lambda library: library())
        self.said: list[str] = []
        self.loads = 0
        self.reactor = Reactor()
        self.memory = DeviceMemoryWait(self.reactor, log=NullEventLog(), say=self.said.append)
        self._query = query

    def _load(self) -> Any | None:
        self.loads += 1
        return self._query

    def wait(self, *ended: int) -> None:
        self.memory.begin(ended)
        self.memory.wait(lambda: None)


def test_memory_that_stays_held_is_told_of_and_left_unless_the_node_has_stood_by_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory_wait, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(device_memory_wait, "TELL_AFTER_S", 0.05)
    one = Waiting(lambda: [HELD, Holding(1, 8)], monkeypatch)
    one.wait(7, 8)
    held = "process 7 on GPU 0 (3.0 GiB), process 8 on GPU 1"
    assert one.said == [
        f"waiting for device memory of the last cycle, at most 0.2 s: {held}",
        f"after 0.2 s device memory of the last cycle is still held: {held}; "
        "starting the ranks without waiting any longer",
    ]
    monkeypatch.setattr(device_memory_wait, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(device_memory_wait, "_RECENT_S", -1.0)
    one.wait(7)
    assert len(one.said) == 2
    one.reactor.close()


def test_a_driver_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory_wait, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(device_memory_wait, "DRIVER_S", 0.05)
    answer = threading.Event()

    def silent() -> None:
        answer.wait(30)

    one = Waiting(silent, monkeypatch)
    one.wait(7)
    one.wait(8)
    answer.set()
    one.reactor.close()
    assert one.loads == 1
    assert one.said == ["the NVIDIA driver is not responding: no longer waiting for the device memory of exited ranks"]
