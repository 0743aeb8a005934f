"""A helper process of the launcher: what becomes of its messages, its descriptors and its end, whatever it does."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link import helper_process
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.helper_process import HelperProcess
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import Channel, close_fds

BOUND_S = 10.0
BAD = "bad"


class Helper:
    """A helper process that is a connection, and an event in place of a pidfd. ``taken``: names of its messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reactor: Reactor) -> None:
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC)
        self.signals: list[int] = []
        self.taken: list[str] = []
        self.told: list[str] = []
        monkeypatch.setattr(os, "pidfd_open", lambda _pid: self.pidfd)
        monkeypatch.setattr(helper_process, "send_signal", self._signal)
        self.process = HelperProcess(
            *(reactor, self._spawn), parse=self._parse, take=self._take, ended=self.told.append
        )

    def _spawn(self, launcher_fd: int) -> Any:
        self.end = Channel(socket.socket(fileno=os.dup(launcher_fd)))
        return SimpleNamespace(pid=-7, wait=lambda: -9)

    def _signal(self, _pidfd: int, number: int) -> None:
        self.signals.append(number)
        self.die()

    def _parse(self, raw: Raw) -> str:
        if raw.name == BAD:
            raise ProtocolError("no such message")
        return raw.name

    def _take(self, message: str, fds: tuple[int, ...]) -> None:
        self.taken.append(message)
        close_fds(fds)

    def send(self, name: str, *fds: int) -> None:
        self.end.send({"type": name}, fds)

    def die(self) -> None:
        os.eventfd_write(self.pidfd, 1)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch, reactor: Reactor) -> Iterator[Helper]:
    made = Helper(monkeypatch, reactor)
    yield made
    made.process.dismiss()
    made.process.wait(0.0)
    made.end.close()


def test_process_that_dies_is_heard_out_reaped_and_told_of_once(helper: Helper, reactor: Reactor) -> None:
    assert helper.process.is_alive
    helper.send("last")
    helper.end.close()
    helper.die()
    reactor.run_until(lambda: bool(helper.told), time.monotonic() + BOUND_S)
    assert (helper.taken, helper.told) == (["last"], ["exited (SIGKILL)"])
    assert not helper.process.is_alive
    assert helper.process.pid not in helper_process.unreaped
    helper.process.dismiss()
    helper.process.wait(0.0)
    assert len(helper.told) == 1


def test_process_whose_message_cannot_be_read_is_killed_and_told_of_once(helper: Helper, reactor: Reactor) -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    for name in ("good", BAD, "good"):
        helper.send(name, writer)
    os.close(writer)
    reactor.run_until(lambda: helper.process.pid not in helper_process.unreaped, time.monotonic() + BOUND_S)
    assert os.read(reader, 1) == b"", "a descriptor of an unread message is left"
    os.close(reader)
    assert helper.taken == ["good"]
    assert helper.signals[0] == signal.SIGKILL
    assert helper.told == ["sent a message that the launcher can't read: no such message"]


def test_dismissed_process_is_heard_out_and_killed_and_its_end_is_not_told(helper: Helper, reactor: Reactor) -> None:
    helper.send("last")
    helper.process.dismiss()
    reactor.run_until(lambda: helper.process.pid not in helper_process.unreaped, time.monotonic() + BOUND_S)
    assert (helper.taken, helper.told, helper.signals[0]) == (["last"], [], signal.SIGKILL)


def test_process_that_takes_no_message_is_killed(helper: Helper, reactor: Reactor) -> None:
    helper.end.close()
    helper.process.send({"type": "order"}, timeout_s=0.0)  # type: ignore[arg-type]
    assert helper.signals == [signal.SIGKILL]
    reactor.run_until(lambda: bool(helper.told), time.monotonic() + BOUND_S)
    assert helper.told == ["exited (SIGKILL)"]
