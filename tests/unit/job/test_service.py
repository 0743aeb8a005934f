"""The coordinator's machine on sockets: what it sends, what it hears, and when it can't open more of them."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ft.job import service as service_module
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.service import Service
from megatron_ft.link import tcp
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import encode
from tests.support.coordination import Listened, Peer

BOUND_S = 20.0


class Full(socket.socket):
    """A listener from which no connection can be taken for a while."""

    code = errno.EMFILE
    tries = 0

    def accept(self) -> Any:
        """As it is with too many files open."""
        self.tries += 1
        if self.code:
            raise OSError(self.code, "Too many open files")
        return super().accept()


DEFINED = m.JobDefinition("job", m.Rules(min_nodes=1, max_nodes=4))
HELLO = m.Hello("job", DEFINED.rules, "i0", "host")


def turns_until(reactor: Reactor, condition: Callable[[], bool]) -> int:
    """How often the loop has waited, and served."""
    turns, until_s = 0, time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until_s
        reactor.run_once(BOUND_S)
        turns += 1
    return turns


def test_connections_that_can_not_be_taken_wait_and_cost_nothing(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FULL_PAUSE_S", 0.2)
    listener = Full(fileno=tcp.listen("127.0.0.1", 0).detach())
    listener.setblocking(False)
    said: list[str] = []
    machine = Coordinator("c", DEFINED, parts=LEADER_PARTS)
    service = Service(reactor, machine, listener=listener, say=said.append)
    late = socket.create_connection(listener.getsockname(), timeout=BOUND_S)
    try:
        turns = turns_until(reactor, lambda: listener.tries >= 3)
        assert turns < 30
        assert said[0].startswith("no more launchers can be let in beside 0 connections (Too many open files)")
        listener.code = 0
        turns_until(reactor, lambda: bool(service.links))
    finally:
        late.close()
        service.close()


@contextlib.contextmanager
def served(reactor: Reactor) -> Iterator[tuple[Service, Any, Listened]]:
    """A service, its address, and its machine."""
    machine, listener = Listened(DEFINED), tcp.listen("127.0.0.1", 0)
    service = Service(reactor, machine, listener=listener)
    try:
        yield service, listener.getsockname(), machine
    finally:
        service.close()


@contextlib.contextmanager
def client(reactor: Reactor, address: Any, *frames: bytes) -> Iterator[socket.socket]:
    """A launcher's end of a connection, on which that is said."""
    with socket.create_connection(address, timeout=BOUND_S) as sock:
        peer = Peer(sock)
        peer.write(*frames)
        reactor.watch(sock.fileno(), peer.read)
        yield sock
        reactor.unwatch(sock.fileno())


def test_message_behind_one_that_drops_the_connection_is_not_heard(reactor: Reactor) -> None:
    other = m.Hello("another", DEFINED.rules, "i0", "host")
    with served(reactor) as (service, address, machine), client(reactor, address, encode(other), encode(m.Beat())):
        turns_until(reactor, lambda: bool(machine.messages) and not service.links)
        assert machine.messages == [other]


def test_a_connection_that_was_reset_is_told_from_one_that_was_closed_and_so_is_one_given_up_here(
    reactor: Reactor,
) -> None:
    def resets(sock: socket.socket) -> None:
        reactor.unwatch(sock.fileno())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    ends: list[tuple[tuple[bytes, ...], Callable[[socket.socket], object]]] = [
        ((encode(HELLO),), lambda sock: sock.shutdown(socket.SHUT_WR)),
        ((encode(HELLO),), resets),
        ((encode(HELLO), encode(HELLO)), lambda _sock: None),
    ]
    with served(reactor) as (_, address, machine):
        for number, (frames, end) in enumerate(ends, 1):
            with client(reactor, address, *frames) as sock:
                turns_until(reactor, lambda number=number: len(machine.messages) == number)  # type: ignore[misc]
                end(sock)
                turns_until(reactor, lambda number=number: len(machine.ends) == number)  # type: ignore[misc]
        assert [end["reset"] for end in machine.ends] == [False, True, True]
        assert not any(end["silent"] for end in machine.ends)


def test_end_of_a_connection_within_the_process_is_no_sign_that_its_launcher_has_ended(reactor: Reactor) -> None:
    with served(reactor) as (service, _, machine), service.dial("", 0) as launcher:
        peer = Peer(launcher)
        peer.write(encode(HELLO))
        reactor.watch(launcher.fileno(), peer.read)
        turns_until(reactor, lambda: bool(machine.messages))
        reactor.run_once(0.1)
        reactor.unwatch(launcher.fileno())
        launcher.close()
        turns_until(reactor, lambda: bool(machine.ends))
        assert [end["reset"] for end in machine.ends] == [True]
