"""A process without the secret between a launcher and its coordinator: it can forward and cut, and nothing else."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_ft.job import service as service_module
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.link import tcp
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secure_channel import Challenge, Proof
from megatron_ft.link.wire import encode
from tests.support.coordination import BOUND_S, Ear, coordination, until
from tests.unit.job.test_coordination_transport import HELLO, SECRET, Served, of_version, served

Change = Callable[[bytes], bytes]
DECIDED = encode(Assignment(Decision(0, "evil.1", DecisionKind.END, 0, 1, code=0, text="all done")))


class Relay:
    """Passes each chunk on, in both directions, changed by ``up`` (to the coordinator) and ``down``."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.up: Change = lambda data: data
        self.down: Change = lambda data: data
        self._target = address
        self._listener = tcp.listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        pairs: dict[socket.socket, tuple[socket.socket, bool]] = {}
        while not self._is_over:
            for sock in select.select([self._listener, *pairs], [], [], 0.02)[0]:
                if sock is self._listener:
                    near, far = sock.accept()[0], socket.create_connection(self._target)
                    pairs[near], pairs[far] = (far, True), (near, False)
                elif sock in pairs:
                    other, is_up = pairs[sock]
                    with contextlib.suppress(OSError):
                        data = sock.recv(1 << 16)
                        if data:
                            other.sendall((self.up if is_up else self.down)(data))
                            continue
                    for each in (sock, other):
                        del pairs[each]
                        each.close()
        for sock in [self._listener, *pairs]:
            sock.close()

    def close(self) -> None:
        self._is_over = True
        self._thread.join(BOUND_S)


class Relayed:
    """A launcher whose hello was answered through a relay."""

    def __init__(self, reactor: Reactor, service: Served, relay: Relay) -> None:
        self.ear, self.lines, self.coordinator_lines = Ear(), [], service.said  # type: ignore[var-annotated]
        self.reactor, self.relay = reactor, relay
        self.transport = coordination(reactor, self.ear, SECRET, say=self.lines.append)
        self.transport.connect(relay.address)
        until(reactor, lambda: self.ear.told)
        self.transport.transmit(HELLO)
        until(reactor, lambda: self.ear.heard_messages)
        self.heard = len(self.ear.heard_messages)
        assert self.ear.told[0] == "opened"


@pytest.fixture
def relayed(reactor: Reactor) -> Iterator[Relayed]:
    with served(SECRET) as service:
        relay = Relay(service.listener.getsockname())
        made = Relayed(reactor, service, relay)
        try:
            yield made
        finally:
            made.transport.close()
            relay.close()


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _data: DECIDED, "isn't authentic"),
        (lambda data: data + DECIDED, "isn't authentic"),
        (flipped, "isn't authentic"),
        (lambda data: data + data, "was sent twice or late"),
    ],
)
def test_a_relay_that_speaks_to_a_launcher_ends_the_connection_and_decides_nothing(
    relayed: Relayed, change: Change, why: str
) -> None:
    relayed.relay.down = change
    relayed.transport.transmit(m.Beat())  # is answered
    until(relayed.reactor, lambda: relayed.ear.told[-1] == "broken")
    assert Assignment not in map(type, relayed.ear.heard_messages[relayed.heard :])
    (line,) = relayed.lines
    assert line.startswith(f"closed the connection to the coordinator at {relayed.relay.address}: frame ")
    assert why in line


def test_a_relay_that_speaks_to_a_coordinator_ends_the_connection_and_no_job(relayed: Relayed) -> None:
    relayed.relay.up = lambda data: data + encode(m.Shutdown("bye"))
    relayed.transport.transmit(m.Beat())
    until(relayed.reactor, lambda: relayed.ear.told[-1] == "broken")
    (line,) = relayed.coordinator_lines
    assert line.startswith("closed the connection from 127.0.0.1:")
    assert "isn't authentic" in line
    assert relayed.lines == []


@pytest.mark.parametrize(
    "body", [encode(Challenge("0" * 32)) + encode(Proof("0" * 64)), of_version(99, {"type": "challenge"})]
)
def test_a_refusal_without_a_proof_ends_no_launcher_that_was_let_in_before(relayed: Relayed, body: bytes) -> None:
    with tcp.listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        relayed.transport.connect(address)
        select.select([listener], [], [], BOUND_S)
        with listener.accept()[0] as other:
            other.sendall(body)
            until(relayed.reactor, lambda: relayed.ear.told[-1] in ("failed", "broken"))
    assert relayed.ear.told[-1] == "failed"
    (line,) = relayed.lines
    assert line.startswith(f"the coordinator at {address} ")


def test_idle_connections_of_an_address_are_bounded_and_closed_after_a_while(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MOST_STRANGERS", 4)
    monkeypatch.setattr(service_module, "GREETING_S", 0.5)
    with served(None) as service, contextlib.ExitStack() as stack:
        address = service.listener.getsockname()
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        more = stack.enter_context(socket.create_connection(address))
        for sock, within_s in ((more, 0.4), *((each, BOUND_S) for each in idle)):
            sock.settimeout(within_s)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass  # its challenge
        ear = Ear()
        transport = coordination(reactor, ear)
        transport.connect(service.address)
        until(reactor, lambda: ear.told)
        transport.transmit(HELLO)
        until(reactor, lambda: ear.heard_messages)
        assert not reactor.run_until(lambda: "broken" in ear.told, time.monotonic() + 0.8), "it has said hello"
        transport.close()
