"""A launcher's connection to a coordinator: the real service on a socket, and the one in its own process."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.job.service import Service
from megatron_ft.link import tcp, wire
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import BOUND_S, Ear, Listened, Peer, coordination, sockets, until

SECRET = b"0123456789abcdef"
RULES = m.Rules(min_nodes=1, max_nodes=1)
DEFINED = m.JobDefinition("job", RULES)
HELLO = m.Hello("job", RULES, "i0", "host")


class Served:
    """The real service in a thread."""

    def __init__(self, secret: bytes | None) -> None:
        self.listener = tcp.listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.machine = Listened(DEFINED)
        self.said: list[str] = []
        self._reactor = Reactor()
        self.service = Service(self._reactor, self.machine, listener=self.listener, secret=secret, say=self.said.append)
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._reactor.run_until(lambda: self._is_over or self.service.is_over)
        self.service.close()

    def close(self) -> None:
        self._is_over = True
        self._reactor.post(lambda: None)
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        self._reactor.close()


@contextlib.contextmanager
def served(secret: bytes | None = None) -> Iterator[Served]:
    made = Served(secret)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("theirs", "ours"), [(None, SECRET), (SECRET, None), (SECRET, SECRET[::-1])])
def test_launcher_that_does_not_share_the_secret_is_refused_in_one_line(
    reactor: Reactor, theirs: bytes | None, ours: bytes | None
) -> None:
    with served(theirs) as service, sockets(reactor, ours) as (transport, ear):
        transport.connect(service.address)
        until(reactor, lambda: ear.told)
        (refused,) = ear.told
        assert refused.code == MISTAKE_CODE
        words = "another secret: FT_SECRET (or FT_SECRET_FILE) must be the same on all nodes"
        assert refused.text == f"the coordinator at {service.address} has {words}"
        transport.transmit(HELLO)  # has no effect
        reactor.run_once(0.05)
        assert len(ear.told) == 1


@pytest.mark.parametrize(
    "data",
    [
        wire.encode({"type": "challenge"}),
        wire.encode({"type": "challenge", "nonce": "\ud800"}),
        wire.encode({"type": "proof", "mac": "00" * 32}),
        (1 << 20).to_bytes(4, "big") + bytes(5000),  # before its proof it may send few
    ],
)
def test_peer_that_does_not_prove_the_secret_is_no_coordinator(reactor: Reactor, data: bytes) -> None:
    with tcp.listen("127.0.0.1", 0) as listener, sockets(reactor, SECRET) as (transport, ear):
        transport.connect(f"127.0.0.1:{listener.getsockname()[1]}")
        select.select([listener], [], [], BOUND_S)
        with listener.accept()[0] as other:
            until(reactor, lambda: select.select([other], [], [], 0)[0])
            heard = other.recv(4096)
            other.sendall(data)
            until(reactor, lambda: ear.told)
        assert [wire.decode(body).name for body in wire.Decoder().bodies(heard)] == ["challenge"]
        assert ear.told == ["broken"]


def of_version(version: int, message: dict[str, Any]) -> bytes:
    body = json.dumps({"v": version, "fds": 0, **message}).encode()
    return len(body).to_bytes(4, "big") + body


def test_a_coordinator_of_another_version_is_named_with_both(reactor: Reactor) -> None:
    with served() as service:
        with socket.create_connection(service.listener.getsockname(), timeout=BOUND_S) as newer:
            newer.sendall(of_version(wire.PROTOCOL_VERSION + 1, {"type": "hello"}))
            data = b"".join(iter(lambda: newer.recv(4096), b""))
        (body,) = wire.Decoder().bodies(data)
        assert json.loads(body)["v"] == wire.PROTOCOL_VERSION

    with tcp.listen("127.0.0.1", 0) as listener, sockets(reactor) as (transport, ear):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        transport.connect(address)
        select.select([listener], [], [], BOUND_S)
        with listener.accept()[0] as other:
            other.sendall(of_version(wire.PROTOCOL_VERSION + 1, {"type": "challenge"}))
            until(reactor, lambda: ear.told)
        assert ear.told[0].text == (
            f"the coordinator at {address} speaks version {wire.PROTOCOL_VERSION + 1} of the protocol, "
            f"this launcher version {wire.PROTOCOL_VERSION}: all nodes need the same megatron_ft"
        )


@pytest.mark.parametrize(
    ("secret", "data"),
    [
        (None, b"GET / HTTP/1.1\r\n\r\n"),
        (None, b"\xff" * 64),
        (None, of_version(wire.PROTOCOL_VERSION, {"type": "ready"})),
        (None, of_version(wire.PROTOCOL_VERSION, {"type": "hello"})),
        (SECRET, wire.encode({"type": "proof"})),
        (SECRET, wire.encode({"type": "proof", "mac": "00" * 32})),
        (SECRET, wire.encode({"type": "proof", "mac": 7})),
        (SECRET, wire.encode({"type": "proof", "mac": "\ud800"})),
        (SECRET, wire.encode({"type": "challenge", "nonce": "00"})),
        (SECRET, wire.encode({"type": "hello"})),
    ],
)
def test_bytes_that_are_no_hello_end_their_own_connection_only(
    reactor: Reactor, secret: bytes | None, data: bytes
) -> None:
    with served(secret) as service, sockets(reactor, secret) as (transport, ear):
        transport.connect(service.address)
        until(reactor, lambda: ear.told)
        transport.transmit(HELLO)
        with socket.create_connection(service.listener.getsockname(), timeout=BOUND_S) as stranger:
            stranger.sendall(data)
            said = b"".join(iter(lambda: stranger.recv(4096), b""))
        assert [wire.decode(body).name for body in wire.Decoder().bodies(said)] == ["challenge"]
        until(reactor, lambda: ear.heard_messages)
        assert "broken" not in ear.told
        assert service.machine.messages == [HELLO]


def test_address_that_refuses_or_cannot_be_resolved_is_a_failure(reactor: Reactor) -> None:
    with tcp.listen("127.0.0.1", 0) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    with sockets(reactor) as (transport, ear):
        unknown = "the host name cannot be resolved"
        problems = {
            free: "Connection refused",
            "localhost:1": "Connection refused",
            "no.such.host.invalid:1": unknown,
            "a" * 300 + ":1": unknown,
            "nonsense": unknown,
        }
        for count, address in enumerate(problems, 1):
            transport.connect(address)
            until(reactor, lambda count=count: len(ear.told) == count)
            assert ear.problem.startswith(problems[address])
        assert set(ear.told) == {"failed"}


def test_silent_name_server_holds_up_nothing_and_is_asked_once_for_a_coordinator_that_is_found_again(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go, asked = socket.getaddrinfo, threading.Event(), list[str]()

    def slow(host: str, port: int, *args: Any, **more: Any) -> Any:
        if not host[0].isdigit():  # for an address no server is asked
            asked.append(host)
            go.wait(BOUND_S)
        return real("127.0.0.1", port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with served() as service, sockets(reactor) as (transport, ear):
        name = f"slow.host:{service.address.rpartition(':')[2]}"
        for _ in range(3):
            transport.connect(name)
            transport.connect()
        transport.connect(service.address)
        until(reactor, lambda: ear.told == ["opened"])
        transport.connect(name)
        go.set()
        until(reactor, lambda: ear.told == ["opened", "opened"])
        transport.transmit(HELLO)
        until(reactor, lambda: ear.heard_messages)
        transport.connect(name)
        until(reactor, lambda: ear.told.count("opened") == 3)
        assert asked == ["slow.host"]


def accepted(reactor: Reactor, listener: socket.socket, ear: Ear) -> Peer:
    """The other end of a launcher's connection, after a handshake."""
    select.select([listener], [], [], BOUND_S)
    peer = Peer(listener.accept()[0], connects=False)
    until(reactor, lambda: bool(peer.read() or ear.told))
    return peer


def test_message_larger_than_the_socket_takes_is_sent_piece_by_piece(reactor: Reactor) -> None:
    with tcp.listen("127.0.0.1", 0) as listener, sockets(reactor) as (transport, ear):
        transport.connect(f"127.0.0.1:{listener.getsockname()[1]}")
        other = accepted(reactor, listener, ear)
        big = m.NodeUnfit("x" * 900_000)
        for _ in range(7):
            transport.transmit(big)
        transport.transmit(m.Ready())
        heard: list[Any] = []

        def read() -> None:
            heard.extend(other.read())

        reactor.watch(other.fileno(), read)
        until(reactor, lambda: len(heard) == 8)
        assert heard[-1].name == "ready"
        begun_s = time.monotonic()
        reactor.run_once(0.05)
        assert time.monotonic() - begun_s >= 0.05  # nobody waits for room any more
        reactor.unwatch(other.fileno())
        other.close()
        until(reactor, lambda: ear.told == ["opened", "broken"])


def test_unsent_messages_have_a_bounded_time_to_go_at_the_end(reactor: Reactor) -> None:
    with tcp.listen("127.0.0.1", 0) as listener, sockets(reactor) as (transport, ear):
        transport.connect(f"127.0.0.1:{listener.getsockname()[1]}")
        stuck = accepted(reactor, listener, ear)
        for _ in range(8):
            transport.transmit(m.NodeUnfit("x" * 900_000))
        begun_s = time.monotonic()
        transport.close(0.2)
        assert 0.2 <= time.monotonic() - begun_s < 5.0  # it reads nothing
        stuck.close()


def within(reactor: Reactor, member: Any, **more: Any) -> Coordination:
    """A launcher with a coordinator on the same loop."""
    service = Service(reactor, Coordinator("c", DEFINED, now_s=time.monotonic(), parts=LEADER_PARTS))
    return coordination(reactor, member, dial=service.dial, **more)


def test_job_of_one_node_is_coordinated_in_the_process_of_its_launcher(reactor: Reactor) -> None:
    decisions: list[Any] = []
    who = m.Identity("job", RULES, "i0", "host", "", endpoint="this process", rank=0)
    member = Member(who, now_s=time.monotonic(), chance=random.Random(1))
    member.owns = True
    node = within(reactor, member, on_decision=decisions.append)
    node.start()
    node.tell(m.Ready())
    until(reactor, lambda: Assignment in map(type, decisions))
    assert member.is_led
    assert node.connection is not None
    node.connection.sock.shutdown(socket.SHUT_RDWR)
    until(reactor, lambda: not member.is_led)
    until(reactor, lambda: member.is_led)  # it is the same coordinator
    assert [*map(type, decisions)].count(Assignment) == 1
    node.tell(m.Report(0, NodeState.SUCCEEDED))
    until(reactor, lambda: m.End in map(type, decisions))
    node.tell(m.Ready())
    until(reactor, lambda: node.orders.left is not None)
    assert node.orders.left is not None
    assert node.orders.left.code == 0
    node.close()
