"""The coordinator's port under attack by processes without the secret."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.rules import messages as m
from megatron_ft.link import tcp
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secret import Challenge, Denied, Proof
from megatron_ft.link.wire import encode
from tests.fuzz.hostile import Hostile
from tests.support.arrived import arrived
from tests.support.coordination import connect, sockets, until

__all__ = ["attack_coordinator"]

Say = Callable[[str], None]
Send = Callable[[Any], None]
_SECRET = b"fuzzing-fuzzing-fuzzing"
_JOB = m.JobDefinition("fuzz", m.Rules(1, 1))
_HELLO = m.Hello("fuzz", _JOB.rules, "i0", "host")
_MESSAGES = (
    *(Challenge("00" * 16), Proof("00" * 32), Denied()),
    *(_HELLO, m.Beat(), m.Shutdown("bye"), m.Goodbye("bye")),
)
_MORE_KIB = 40_000
_BOUND_S = 60.0
_LEFT_OPEN = 400


def attack_coordinator(seed: int, say: Say, *, messages: int) -> None:
    """The port of a real coordinator that has a secret, with a launcher behind it that must hear what it asks for.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng, sent, connections = random.Random(seed), 0, 0
    hostile = Hostile(rng, [json.loads(arrived(each).body) for each in _MESSAGES])
    listener, lines, reactor = tcp.listen("127.0.0.1", 0), list[str](), Reactor()
    host, port = listener.getsockname()[:2]
    leader = LeaderProcess(reactor, _JOB, secret=_SECRET, environ=os.environ, say=lines.append)
    with contextlib.closing(reactor), contextlib.closing(leader):
        leader.begin(f"{host}:{port}", listener)
        pids = leader.pids()
        with _launcher(reactor, f"{host}:{port}") as ask:
            ask(_HELLO)
            before = _rss_kib(*pids)
            left: list[socket.socket] = []
            while sent < messages:
                attack = hostile.attack()
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((host, port), _BOUND_S)
                    left.append(sock)
                    if rng.random() < 0.3:
                        sock.sendall(encode(_MESSAGES[0]))
                    for piece in attack.pieces:
                        sock.sendall(piece)
                sent, connections = sent + attack.messages, connections + 1
                if attack.ending != "leave" or len(left) > _LEFT_OPEN:
                    left.pop(rng.randrange(len(left))).close()
                if connections % 500 == 0:
                    ask(m.Beat())
            ask(m.Beat())
            with _launcher(reactor, f"{host}:{port}") as newcomer:
                newcomer(m.Hello("fuzz", _JOB.rules, "i1", "host2"))
            after = _rss_kib(*pids)
            assert after < before + _MORE_KIB, (before, after)
            assert (lines, leader.pids()) == ([], pids), "the coordinator has exited"
            for sock in left:
                sock.close()
    say(f"anybody -> coordinator: {sent} messages on {connections} connections; {before} KiB before, {after} after")


@contextlib.contextmanager
def _launcher(reactor: Reactor, address: str) -> Iterator[Send]:
    """Connect a launcher that knows the secret; what is yielded sends a message and waits for an answer."""
    with sockets(reactor, _SECRET) as (transport, ear):

        def ask(message: Any) -> None:
            count = len(ear.heard_messages)
            transport.transmit(message)
            until(reactor, lambda: len(ear.heard_messages) > count)

        until_s = time.monotonic() + _BOUND_S
        while ear.told[-1:] != ["opened"]:  # a flood from its own address may displace it: it comes again
            assert time.monotonic() < until_s, "a launcher that knows the secret isn't let in"
            ear.told.clear()
            connect(transport, ear, address)
            until(reactor, lambda: ear.told)
        yield ask


def _rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
