"""Keepers in threads of the test: the real one, and one that answers what the test says."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.wire import Channel, ChannelClosedError, listen
from megatron_ft.memory.base.keeper_messages import (
    KEEPER_TO_LAUNCHER,
    RANK_TO_KEEPER,
    DropSegment,
    Granted,
    KeeperHello,
    Prepare,
)
from megatron_ft.memory.keeper.service import KeeperService
from megatron_ft.memory.rank import saving
from megatron_ft.memory.rank.keeper_connection import KeeperConnection
from megatron_ft.memory.rules.snapshots import Saved, Settled
from megatron_ft.rank.base import say
from tests.memory.flips import DIGEST


class RealKeeper:
    """Keeper of one rank, in cycle 0, if it is ``prepared``. ``answers``: with a launcher that takes each snapshot for
    complete.
    """

    def __init__(self, path: Path, *, answers: bool = False, prepared: bool = True) -> None:
        here, there = socket.socketpair()
        self.path = path
        self.launcher = Channel(here)
        self._listener = listen(str(path))
        self.may_verify = threading.Event()
        self.may_verify.set()
        self._service = KeeperService(self._listener, Channel(there), self._digest)
        self._thread = threading.Thread(target=self._service.run, daemon=True)
        self._thread.start()
        if prepared:
            self.launcher.send(Prepare(0, (0,), 1, pickle_key="aa" * 32))
        self.heard: list[Any] = []
        if answers:
            threading.Thread(target=self._answer, daemon=True).start()

    def _digest(self, data: Any) -> bytes:
        self.may_verify.wait()
        return DIGEST(data)

    def _answer(self) -> None:
        with contextlib.suppress(ChannelClosedError, OSError, ValueError):
            while True:
                select.select([self.launcher.fileno()], [], [], 0.05)  # a selected socket isn't closed for the peer
                for message in self.said():
                    self.heard.append(message)
                    if isinstance(message, DropSegment):
                        self.launcher.send(message)
                    elif isinstance(message, Saved):
                        self.launcher.send(Settled(message.key, message.key))

    def said(self) -> list[Any]:
        """Return what the launcher was told since the last call."""
        found = []
        for message, fds in self.launcher.receive():
            for fd in fds:
                os.close(fd)
            found.append(KEEPER_TO_LAUNCHER.parse(message))
        return found

    def close(self) -> None:
        self.launcher.close()
        self._thread.join()
        for caller in self._service._callers:
            caller.channel.close()
        self._listener.close()
        if saving.running is not None:
            saving.running.wait()


class ScriptedKeeper:
    """Answers requests by their type: those without an answer are only noted."""

    def __init__(self, path: Path, answers: dict[type, Any] | None = None) -> None:
        self.answers = {KeeperHello: Granted()} if answers is None else answers
        self.requests: list[Any] = []
        self._channels: list[Channel] = []
        self._listener = listen(str(path))
        self._listener.setblocking(True)
        threading.Thread(target=self._accept, daemon=True).start()

    def count(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.requests)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._channels:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        self._channels.append(channel)
        with contextlib.suppress(ChannelClosedError, ProtocolError):
            while True:
                select.select([channel.fileno()], [], [])
                for message, _ in channel.receive():
                    request = RANK_TO_KEEPER.parse(message)
                    self.requests.append(request)
                    if type(request) in self.answers:
                        channel.send(self.answers[type(request)])


def be_rank_0(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process rank 0 in cycle 0, whose keeper is at ``path``."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "FT_CYCLE": "0", "FT_KEEPER_SOCKET": str(path)}
    for name, value in {**variables, "FT_MEMORY_RESTORE": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(saving, "running", None)
    monkeypatch.setattr(KeeperConnection, "quiet_until_s", 0.0)
    monkeypatch.setattr(KeeperConnection, "pickle_key", "")
    say.forget()


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealKeeper]:
    """Keeper of this process, which is rank 0 in cycle 0."""
    keeper = RealKeeper(tmp_path / "k")
    be_rank_0(tmp_path / "k", monkeypatch)
    yield keeper
    keeper.close()


def share_with_another_rank(monkeypatch: pytest.MonkeyPatch, other: set[int]) -> None:
    """Stand in for a process group of two ranks, the other of which has these iterations."""

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine, other]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
