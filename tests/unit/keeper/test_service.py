"""A keeper's loop, in a thread, between the two ends of a launcher's connection and of ranks'."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megatron_ft.core.memory.retention import NodeMemory
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.messages.keeper import (
    KEEPER_TO_LAUNCHER,
    KEEPER_TO_RANK,
    Fetch,
    KeeperHello,
    KeeperWelcome,
    NotKept,
    Prepare,
)
from megatron_ft.ipc.wire import Channel, Received, connect, listen
from megatron_ft.keeper import service
from tests.support.extras import skip_module_without

skip_module_without("xxhash")

from tests.memory.flips import HASHER  # noqa: E402 - needs xxhash

T = TypeVar("T")
BOUND_S = 20.0


class Peer:
    """One end of a connection with the keeper."""

    def __init__(self, channel: Channel, vocabulary: Any) -> None:
        self.channel = channel
        self._vocabulary = vocabulary
        self._received: list[Received] = []

    def hear(self, kind: type[T], bound_s: float = BOUND_S) -> tuple[T, tuple[int, ...]]:
        """The next message, and the descriptors that came with it."""
        if not self._received:
            select.select([self.channel], [], [], bound_s)
            self._received = self.channel.receive()
        message, fds = self._received.pop(0)
        parsed = self._vocabulary.parse(message)
        assert isinstance(parsed, kind), parsed
        return parsed, fds


class Served:
    """A keeper that runs; ``launcher``: the launcher's end."""

    def __init__(self, path: str) -> None:
        self.path = path
        ours, theirs = socket.socketpair()
        self.launcher = Peer(Channel(ours), KEEPER_TO_LAUNCHER)
        self._listener = listen(path)
        keeper = service.KeeperService(self._listener, Channel(theirs), lambda: HASHER())
        self._thread = threading.Thread(target=keeper.run, daemon=True)
        self._thread.start()

    def order(self, message: object, fds: tuple[int, ...] = ()) -> None:
        self.launcher.channel.send(message, fds)

    def rank(self, rank: int, cycle: int = 0) -> Peer:
        """A rank that is welcome."""
        peer = Peer(connect(self.path, BOUND_S), KEEPER_TO_RANK)
        peer.channel.send(KeeperHello(cycle, rank))
        peer.hear(KeeperWelcome)
        return peer

    def end(self) -> None:
        self.launcher.channel.close()
        self._thread.join(BOUND_S)
        self._listener.close()
        assert not self._thread.is_alive()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[NodeMemory], None]:
    """Sets what the keeper takes for the node's memory: 100 GB, and all of it free, until then."""

    def is_now(given: NodeMemory) -> None:
        monkeypatch.setattr(service, "node_memory", lambda: given)
        monkeypatch.setattr(service.work, "node_memory", lambda: given)

    is_now(NodeMemory(10**11, 10**11))
    return is_now


@pytest.fixture
def served(tmp_path: Path, memory: object) -> Iterator[Served]:
    made = Served(str(tmp_path / "keeper.sock"))
    yield made
    made.end()


def test_connection_with_the_number_of_one_that_a_failed_send_has_closed_is_served(served: Served) -> None:
    served.order(Prepare(0, (0, 1), 2))
    gone = served.rank(0)
    waiting = socket.socket(socket.AF_UNIX)  # made now, so that the lowest number is free when the keeper accepts
    sock = socket.socket(fileno=os.dup(gone.channel.fileno()))
    sock.shutdown(socket.SHUT_RD)
    gone.channel.send(Fetch(SnapshotKey(0, 1)))
    poll = select.poll()
    poll.register(sock, 0)
    assert poll.poll(BOUND_S * 1000)  # the keeper has closed its end
    waiting.connect(served.path)
    rank = Peer(Channel(waiting), KEEPER_TO_RANK)
    rank.channel.send(KeeperHello(0, 1))
    rank.hear(KeeperWelcome)
    for each in (gone.channel, sock, rank.channel):
        each.close()
