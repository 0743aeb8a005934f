"""The optimizer's step waits for a snapshot to be read, and never for ever."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ft.core.errors import SnapshotError
from megatron_ft.ipc.memory import segment
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.memory.snapshot import Snapshot
from megatron_ft.rank.memory.tensors import Source, gather
from tests.memory.flips import HASHER

BOUND_S = 20.0


def made(tensor: Any) -> Snapshot:
    gathered = gather({"w": tensor})
    info = RankInfo(0, 0, "", 1)
    return Snapshot(7, info, gathered, later=gathered.sources, copied=[], event=None, bytes_later=8)


def ended_thread() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return thread


@pytest.fixture
def held_write(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, Callable[[], None]]:
    """Writes into segments begin, which sets the event, and go on when the function is called."""
    begun, go_on, write = threading.Event(), threading.Event(), segment.write

    def held(fd: int, data: memoryview, offset: int) -> None:
        begun.set()
        assert go_on.wait(BOUND_S)
        write(fd, data, offset)

    monkeypatch.setattr(segment, "write", held)
    return begun, go_on.set


def test_step_waits_until_the_tensors_are_read(held_write: tuple[threading.Event, Callable[[], None]]) -> None:
    begun, go_on = held_write
    snapshot, fd = made(torch.ones(2)), segment.create()
    writer = threading.Thread(target=snapshot._fill, args=(fd, HASHER))
    snapshot.granted.set()
    writer.start()
    assert begun.wait(BOUND_S)
    step = threading.Thread(target=snapshot.wait_read, args=(writer, 1e9))
    step.start()
    step.join(0.3)
    assert step.is_alive()
    go_on()
    step.join(BOUND_S)
    writer.join(BOUND_S)
    assert not step.is_alive()
    assert not snapshot.is_given_up
    os.close(fd)


def test_step_goes_on_when_the_thread_is_too_slow(held_write: tuple[threading.Event, Callable[[], None]]) -> None:
    begun, go_on = held_write
    errors: list[BaseException] = []
    snapshot, fd = made(torch.ones(2)), segment.create()

    def write() -> None:
        try:
            snapshot._fill(fd, HASHER)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test looks at it
            errors.append(error)

    writer = threading.Thread(target=write)
    snapshot.granted.set()
    writer.start()
    assert begun.wait(BOUND_S)
    snapshot.wait_read(writer, 1e9)  # 2 s
    assert snapshot.is_given_up
    go_on()
    writer.join(BOUND_S)
    assert [type(error).__name__ for error in errors] == ["GivenUpError"]
    os.close(fd)


def test_step_does_not_wait_for_a_thread_that_has_ended() -> None:
    snapshot = made(torch.ones(2))
    snapshot.granted.set()
    snapshot.wait_read(ended_thread(), 1e-9)  # at this speed: for years
    assert snapshot.is_given_up


def test_step_after_a_snapshot_that_is_over_waits_for_nothing() -> None:
    snapshot = made(torch.ones(2))
    snapshot.end()
    snapshot.wait_read(threading.main_thread(), 1e-9)
    assert not snapshot.is_given_up


def test_tensors_are_released_when_the_snapshot_is_over() -> None:
    gathered, copies = gather({"w": torch.ones(2), "v": torch.ones(2)}), gather({"v": torch.ones(2)})
    tensors = [weakref.ref(each.tensor) for each in (*gathered.sources, *copies.sources)]
    snapshot = Snapshot(
        7, RankInfo(0, 0, "", 1), gathered, later=gathered.sources[:1], copied=copies.sources, event=None, bytes_later=8
    )
    del gathered, copies
    assert all(each() is not None for each in tensors[::2])  # those that are still to be read
    snapshot.end()
    assert [each() for each in tensors] == [None, None, None]
    assert snapshot._layout({}).tensors[0].nbytes == 8


def test_tensor_of_a_device_changed_before_its_copy_is_complete_makes_no_snapshot() -> None:
    gathered = gather({"w": torch.ones(2)})
    entry, copy = gathered.sources[0]
    on_device = SimpleNamespace(is_cuda=True, _version=0)

    def synchronize() -> None:
        on_device._version = 1

    snapshot = Snapshot(
        7,
        RankInfo(0, 0, "", 1),
        gathered,
        later=[Source(entry, on_device)],
        copied=[Source(entry, copy)],
        event=SimpleNamespace(synchronize=synchronize),
        bytes_later=8,
    )
    fd = segment.create()
    with pytest.raises(SnapshotError, match=r"state\['w'\] was changed outside the optimizer's step"):
        snapshot._fill(fd, HASHER)
    os.close(fd)
