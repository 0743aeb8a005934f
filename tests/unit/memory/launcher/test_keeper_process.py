"""The launcher's side of the keeper: what becomes of its segments and of questions, whatever the process does."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.link import helper_process
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secret import memory_copies_key, memory_pickle_key
from megatron_ft.link.wire import Channel, close_fds, connect
from megatron_ft.memory.base.keeper_messages import (
    LAUNCHER_TO_KEEPER,
    DropSegment,
    Prepare,
    SealedSegment,
    TakeStock,
)
from megatron_ft.memory.launcher import keeper_process as module
from megatron_ft.memory.launcher.keeper_process import Keeper
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.launcher.snapshots_on_node import FromKeeper
from megatron_ft.memory.rules.snapshots import Kept, KeptSnapshot, Restore, Settled, SnapshotKey, StockTaken

BOUND_S = 20.0
SECRET = b"a secret of the test"
KEY = SnapshotKey(0, 0, 7)


class Processes:
    """Stand-ins for the processes of keepers: each is a connection, and an event in place of a pidfd."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reactor: Reactor, path: str) -> None:
        self.pidfds: list[int] = []
        self.ends: list[Channel] = []
        """The keepers' ends, in their order."""
        self.lines: list[str] = []
        self.events: list[FromKeeper] = []
        monkeypatch.setattr(Keeper, "_spawn", self._start)
        monkeypatch.setattr(os, "pidfd_open", lambda _pid: self.pidfds[-1])
        monkeypatch.setattr(helper_process, "send_signal", lambda pidfd, number: os.eventfd_write(pidfd, 1))
        say = self.lines.append
        files = SnapshotFiles(os.path.dirname(path), reactor, timeout_s=BOUND_S, ranks=1, say=say, say_everywhere=say)
        self.keeper = Keeper(reactor, path, xxhash="", files=files, secret=SECRET, say=say, on_event=self.events.append)
        self.keeper.listen()
        self.keeper.prepare(0, (0,), 1, None)
        connect(path, BOUND_S).close()
        reactor.run_until(lambda: bool(self.ends), None)

    def _start(self, launcher_fd: int) -> Any:
        self.ends.append(Channel(socket.socket(fileno=os.dup(launcher_fd))))
        self.pidfds.append(os.eventfd(0, os.EFD_CLOEXEC))
        return SimpleNamespace(pid=-len(self.ends), wait=lambda: -9)

    def die(self) -> None:
        self.ends[-1].close()
        os.eventfd_write(self.pidfds[-1], 1)

    def heard(self) -> list[Any]:
        """What the last keeper has been told since the last call."""
        messages = self.ends[-1].receive()
        for _, fds in messages:
            close_fds(fds)
        return [LAUNCHER_TO_KEEPER.parse(message) for message, _ in messages]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, reactor: Reactor, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(monkeypatch, reactor, str(tmp_path / "keeper.sock"))
    yield made
    made.keeper.close()
    for end in made.ends:
        end.close()


def hold(processes: Processes, reactor: Reactor, key: SnapshotKey = KEY) -> int:
    """Have the launcher hold the writing end of a pipe as a segment. The other end."""
    reader, writer = os.pipe()
    processes.ends[-1].send(SealedSegment(0, key), (writer,))
    os.close(writer)
    reactor.run_once(BOUND_S)
    return reader


@pytest.mark.parametrize("is_dropped", [False, True])
def test_segments_that_a_dead_keeper_has_dropped_or_left_are_freed_in_the_background(
    processes: Processes, reactor: Reactor, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    threads: list[str] = []

    def close(fds: Any) -> None:
        if fds:
            threads.append(threading.current_thread().name)
        close_fds(fds)

    monkeypatch.setattr(module, "close_fds", close)
    reader = hold(processes, reactor)
    if is_dropped:
        processes.ends[-1].send(DropSegment(0, KEY))
    for _ in range(1 if is_dropped else 5):
        processes.die()
        reactor.run_once(BOUND_S)
    assert processes.keeper.is_given_up is not is_dropped
    assert select.select([reader], [], [], BOUND_S)[0]  # the last writing end is closed
    os.close(reader)
    assert "blocking_call" in threads[-1]


def test_new_keeper_gets_the_segments_and_the_orders_of_the_one_before_and_says_what_it_has(
    processes: Processes, reactor: Reactor
) -> None:
    (prepare,) = processes.heard()
    reader = hold(processes, reactor)
    processes.keeper.tell(Settled(KEY, KEY))
    processes.die()
    reactor.run_once(BOUND_S)
    assert processes.heard() == [SealedSegment(0, KEY), prepare, Settled(KEY, KEY), TakeStock()]
    assert prepare == Prepare(0, (0,), 1, None, memory_pickle_key(SECRET), memory_copies_key(SECRET))
    kept = Kept((KeptSnapshot(KEY, 1, (0,)),))
    processes.ends[-1].send(kept)
    reactor.run_until(lambda: bool(processes.events))
    assert processes.events == [StockTaken(kept)]
    os.close(reader)


def test_keeper_is_told_to_answer_before_it_is_taken_for_silent(processes: Processes, reactor: Reactor) -> None:
    processes.heard()
    processes.keeper.take_stock(lambda kept: None)
    (question,) = processes.heard()
    assert 6.0 < question.within_s <= 7.0


def test_stock_that_is_completed_after_its_time_is_told(processes: Processes, reactor: Reactor) -> None:
    told: list[Kept] = []
    processes.keeper.take_stock(told.append)
    processes.ends[-1].send(Kept())
    late = Kept((KeptSnapshot(KEY, 1, (0,)),))
    processes.ends[-1].send(late)
    reactor.run_until(lambda: bool(processes.events))
    assert (told, processes.events) == ([Kept()], [StockTaken(late)])


def test_complete_snapshot_is_had_though_its_keeper_has_died(processes: Processes, reactor: Reactor) -> None:
    assert processes.keeper.complete_snapshot() is None
    fds = [hold(processes, reactor), hold(processes, reactor, SnapshotKey(0, 0, 8))]
    held = [*processes.keeper._held.values()]
    processes.keeper.tell(Settled(SnapshotKey(0, 0, 8), KEY))
    processes.die()
    assert processes.keeper.complete_snapshot() == (KEY, 1, {0: held[0]})
    processes.keeper.prepare(1, (0, 1), 2, Restore(SnapshotKey(0, 0, 8)))
    assert processes.keeper.complete_snapshot() == (SnapshotKey(0, 0, 8), 2, {0: held[1], 1: -1})
    close_fds(fds)


def test_keepers_that_do_not_say_what_they_have_are_given_up_however_long_each_lived(
    processes: Processes, reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUICK_S", 0.0)
    monkeypatch.setattr(module, "STOCK_S", 0.01)
    kept: list[Kept] = []
    for number in range(5):
        assert not processes.keeper.is_given_up
        processes.keeper.take_stock(kept.append)
        reactor.run_until(lambda number=number: len(processes.lines) > number)
    assert processes.keeper.is_given_up
    assert kept == [Kept()] * 5
    assert processes.lines[-1].startswith("the keeper of memory checkpoints did not say what it has again and again")


def test_silent_keeper_that_hangs_in_the_kernel_is_replaced(
    processes: Processes, reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOCK_S", 0.01)
    reader = hold(processes, reactor)
    with monkeypatch.context() as patched:
        patched.setattr(helper_process, "send_signal", lambda pidfd, number: None)  # it takes no SIGKILL
        processes.keeper.take_stock(lambda kept: None)
        reactor.run_until(lambda: len(processes.ends) == 2, time.monotonic() + BOUND_S)
    assert [type(each) for each in processes.heard()] == [SealedSegment, Prepare, TakeStock]
    kept = Kept((KeptSnapshot(KEY, 1, (0,)),))
    processes.ends[-1].send(kept)
    reactor.run_until(lambda: bool(processes.events))
    assert processes.events == [StockTaken(kept)]
    assert helper_process.unreaped >= {-1, -2}
    os.eventfd_write(processes.pidfds[0], 1)
    reactor.run_once(BOUND_S)
    assert helper_process.unreaped & {-1, -2} == {-2}
    os.close(reader)
