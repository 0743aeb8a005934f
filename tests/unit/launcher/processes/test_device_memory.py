"""Device memory of ranks that have ended: what is waited for, how long, and how the driver is asked."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ft.core import device_memory as core
from megatron_ft.core.device_memory import Holding, MemoryStep
from megatron_ft.ipc.files.event_log import NullEventLog
from megatron_ft.ipc.linux import nvml
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.processes import device_memory
from megatron_ft.launcher.processes.device_memory import DeviceMemory

HELD = Holding(0, 7, 3 << 30)


def test_only_what_ended_processes_hold_is_waited_for() -> None:
    listed = [Holding(0, 5), HELD, Holding(1, 7), Holding(1, 8)]
    assert core.held_by(listed, {7, 9}) == [HELD, Holding(1, 7)]


def test_the_wait_is_bounded() -> None:
    assert core.judge([], 0.0) is core.judge([], 99.0) is MemoryStep.GO_ON
    assert core.judge([HELD], 0.0) is MemoryStep.LOOK_AGAIN
    assert core.judge([HELD], core.LONGEST_WAIT_S) is MemoryStep.GIVE_UP
    waited_s, looks = 0.0, 0
    while core.judge([HELD], waited_s) is MemoryStep.LOOK_AGAIN:
        waited_s, looks = waited_s + core.look_again_s(waited_s), looks + 1
    assert waited_s == pytest.approx(core.LONGEST_WAIT_S)
    assert looks < 60
    assert core.look_again_s(0.0) < 0.05


def test_in_words() -> None:
    assert core.describe([HELD, Holding(1, 8)]) == "process 7 on GPU 0 (3.0 GiB), process 8 on GPU 1"
    assert core.describe([HELD] * 6).endswith("(3.0 GiB) and 2 more")


class Waiting:
    """A ``DeviceMemory`` with a driver of our own."""

    def __init__(self, query: Callable[[], list[Holding] | None] | None) -> None:
        self.said: list[str] = []
        self.loads = 0
        self.reactor = Reactor()
        self.memory = DeviceMemory(
            self.reactor,
            log=NullEventLog(),
            say=self.said.append,
            load=self._load,
            query=lambda library: library(),
        )
        self._query = query

    def _load(self) -> Any | None:
        self.loads += 1
        return self._query

    def wait(self, *ended: int, check: Callable[[], None] = lambda: None) -> None:
        self.memory.begin(ended)
        self.memory.wait(check)


@pytest.fixture
def waiting() -> Iterator[Callable[[Callable[[], list[Holding] | None] | None], Waiting]]:
    made: list[Waiting] = []

    def make(query: Callable[[], list[Holding] | None] | None) -> Waiting:
        made.append(Waiting(query))
        return made[-1]

    yield make
    for each in made:
        each.reactor.close()


Make = Callable[[Callable[[], "list[Holding] | None"] | None], Waiting]


def test_ranks_start_when_the_memory_is_free(waiting: Make) -> None:
    answers = [[HELD], [HELD, Holding(0, 8)], [Holding(0, 8)]]
    one = waiting(lambda: answers.pop(0))
    one.wait(7)
    assert answers == []
    assert one.said == []  # too short to speak of


def test_a_driver_that_tells_nothing_is_not_waited_for(waiting: Make) -> None:
    asked = []
    one = waiting(lambda: asked.append(1))
    one.wait(7)
    assert asked == [1]
    assert one.said == []


def test_without_a_driver_or_anything_ended_nothing_is_done(waiting: Make) -> None:
    threads = threading.active_count()
    without = waiting(None)
    without.wait(7)
    idle = waiting(lambda: pytest.fail("asked"))
    idle.wait()
    idle.memory.wait(lambda: None)  # before the first cycle
    assert threading.active_count() == threads
    assert (without.loads, idle.loads) == (1, 0)


def test_memory_that_stays_held_is_told_of_and_left(waiting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(device_memory, "_TELL_AFTER_S", 0.05)
    one = waiting(lambda: [HELD])
    one.wait(7)
    assert len(one.said) == 2
    assert one.said[0].startswith("waiting for device memory of the last cycle")
    held = "process 7 on GPU 0 (3.0 GiB)"
    assert one.said[1].endswith(f"is still held: {held}; starting the ranks without waiting any longer")


@pytest.mark.parametrize("is_freed", [True, False])
def test_what_was_seen_long_ago_is_looked_at_again(
    waiting: Make, monkeypatch: pytest.MonkeyPatch, is_freed: bool
) -> None:
    """The node stood by after it had given up waiting."""
    monkeypatch.setattr(core, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(device_memory, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(device_memory, "_OLD_S", 0.1)
    held = [HELD]
    one = waiting(lambda: held)
    one.memory.begin([7])
    time.sleep(0.5)
    if is_freed:
        held = []
    one.memory.wait(lambda: None)
    assert len(one.said) == int(not is_freed)
    if not is_freed:
        assert float(one.said[0].split()[1]) >= 0.5  # "after 0.5 s": now, not when it gave up


def test_a_driver_that_does_not_answer_is_asked_once(waiting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(device_memory, "_DRIVER_S", 0.05)
    answer = threading.Event()

    def silent() -> None:
        answer.wait(30)

    one = waiting(silent)
    one.wait(7)
    one.wait(8)
    answer.set()
    assert one.loads == 1
    assert one.said == ["the NVIDIA driver is not responding: no longer waiting for the device memory of exited ranks"]


def test_who_is_asked_to_stop_waits_no_longer(waiting: Make) -> None:
    began_s = time.monotonic()

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waiting(lambda: [HELD] if time.monotonic() < began_s + 2 else []).wait(7, check=check)


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


def test_a_list_that_is_longer_than_expected() -> None:
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


def test_layout_of_the_driver_s_records() -> None:
    # nvmlProcessInfo_v1_t and nvmlProcessInfo_t of nvml.h
    assert ctypes.sizeof(nvml._OldProcess) == 16
    assert ctypes.sizeof(nvml._Process) == 24
    assert (nvml._Process.used.offset, nvml._Process.instance.offset) == (8, 16)  # type: ignore[attr-defined]


def test_asking_imports_no_torch() -> None:
    code = "import sys; from megatron_ft.ipc.linux import nvml; nvml.load(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
