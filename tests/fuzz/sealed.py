"""The coordinator's port under attack by processes without the secret."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from megatron_ft.errors import ProtocolError
from megatron_ft.job.rules import messages as m
from megatron_ft.link import tcp
from megatron_ft.link.base.codec import Message
from megatron_ft.link.base.codec import encode as encode_start
from megatron_ft.link.secret import Ask, Challenge, Denied, Handshake, Proof, Welcome
from megatron_ft.link.secure_channel import Role
from megatron_ft.link.wire import LENGTH_BYTES, Decoder, decode, encode
from tests.fuzz.hostile import Hostile
from tests.support.arrived import arrived

__all__ = ["attack_coordinator"]

Say = Callable[[str], None]
_SECRET = "fuzzing-fuzzing-fuzzing"
_HELLO = m.Hello("fuzz", m.Rules(1, 1), "i0", "host")
_MESSAGES = (
    *(Ask(), Challenge("00" * 16), Proof("00" * 16, "00" * 32), Welcome("00" * 32), Denied()),
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
    with _coordinator() as (address, pid):
        honest = Honest(address)
        honest.ask(_HELLO)
        before = _rss_kib(pid)
        left: list[socket.socket] = []
        while sent < messages:
            attack = hostile.attack()
            with contextlib.suppress(OSError):
                sock = socket.create_connection(address, _BOUND_S)
                left.append(sock)
                if rng.random() < 0.3:
                    sock.sendall(encode(Ask()))
                for piece in attack.pieces:
                    sock.sendall(piece)
            sent, connections = sent + attack.messages, connections + 1
            if attack.ending != "leave" or len(left) > _LEFT_OPEN:
                left.pop(rng.randrange(len(left))).close()
            if connections % 500 == 0:
                honest.ask(m.Beat())
        honest.ask(m.Beat())
        newcomer = Honest(address)
        newcomer.ask(m.Hello("fuzz", m.Rules(1, 1), "i1", "host2"))
        after = _rss_kib(pid)
        assert after < before + _MORE_KIB, (before, after)
        for sock in left:
            sock.close()
    say(f"anybody -> coordinator: {sent} messages on {connections} connections; {before} KiB before, {after} after")


class Honest:
    """A launcher that knows the secret."""

    def __init__(self, address: tuple[str, int]) -> None:
        until_s = time.monotonic() + _BOUND_S
        while True:  # a flood from its own address may displace it: it comes again, as launchers do
            try:
                self._shake_hands(address)
            except (OSError, ProtocolError):
                assert time.monotonic() < until_s, "a launcher that knows the secret isn't let in"
            else:
                return

    def _shake_hands(self, address: tuple[str, int]) -> None:
        self._sock = socket.create_connection(address, _BOUND_S)
        self._sock.settimeout(_BOUND_S)
        self._decoder = Decoder()
        self._handshake = Handshake(_SECRET.encode(), Role.CONNECTS)
        self._sock.sendall(encode(Ask()))
        for body in self._bodies():
            answer = self._handshake.answer(decode(body))
            if answer is not None:
                self._sock.sendall(encode(answer))
            if self._handshake.is_done:
                return

    def _bodies(self) -> Iterator[bytes]:
        while data := self._sock.recv(1 << 16):
            for body in self._decoder.bodies(data):
                channel = self._handshake.channel
                yield body if channel is None else channel.open(body)
        raise ConnectionError("closed")

    def ask(self, message: Message) -> None:
        """Send a message, and wait for the next answer."""
        assert self._handshake.channel is not None
        body = encode(message)[LENGTH_BYTES:]
        self._sock.sendall(self._handshake.channel.seal(body) + body)
        next(self._bodies())


@contextlib.contextmanager
def _coordinator() -> Iterator[tuple[tuple[str, int], int]]:
    listener = tcp.listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    fd = listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_ft.job", f"--owner={os.getpid()}", f"--listener={fd}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
        env={**os.environ, "FT_SECRET": _SECRET},
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as file:
        file.write(encode_start(m.LeaderStart(m.JobDefinition("fuzz", _HELLO.rules))))
    listener.close()
    try:
        yield address, process.pid
        assert process.poll() is None, "the coordinator has exited"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
