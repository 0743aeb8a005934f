"""The optimizer's step waits for a snapshot to be read, and never for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ft.ipc.memory import segment
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.memory.snapshot import Snapshot
from megatron_ft.rank.memory.tensors import gather
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


def test_step_hardly_waits_for_a_segment_that_is_not_allocated() -> None:
    snapshot = made(torch.ones(2))
    snapshot.wait_read(threading.main_thread(), 1e-9)
    assert snapshot.is_given_up


def test_step_after_a_snapshot_that_is_over_waits_for_nothing() -> None:
    snapshot = made(torch.ones(2))
    snapshot.end()
    snapshot.wait_read(threading.main_thread(), 1e-9)
    assert not snapshot.is_given_up
