"""The coordinator's port under attack by processes without the secret; and its frames, changed on their way."""

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
from megatron_ft.link.secure_channel import NONCE_BYTES, Role, SecureChannel, Session
from megatron_ft.link.wire import LENGTH_BYTES, Decoder, decode, encode
from tests.fuzz.hostile import Hostile
from tests.support.arrived import arrived

__all__ = ["attack_coordinator", "attack_frames"]

Say = Callable[[str], None]
_SECRET = "fuzzing-fuzzing-fuzzing"
_HELLO = m.Hello("fuzz", m.Rules(1, 1), "i0", "host", session=1)
_MESSAGES = (
    *(Ask(), Challenge("00" * 16), Proof("00" * 16, "00" * 32), Welcome("00" * 32), Denied()),
    *(_HELLO, m.Beat(), m.Shutdown("bye"), m.Goodbye("bye")),
)
_MORE_KIB = 40_000
_BOUND_S = 60.0
_LEFT_OPEN = 400
_LONGEST_REASON = 200


def attack_frames(seed: int, say: Say, *, messages: int) -> None:
    """Sealed streams with changes of any kind, in this process, in pieces of any size.

    Raises:
        AssertionError: a body was read that wasn't sent in this place, or another error came than the one it may raise.
    """
    rng, sent, read, refused, longest = random.Random(seed), 0, 0, 0, 0
    while sent < messages:
        session = Session(rng.randbytes(16), "fuzz", connects=rng.randbytes(NONCE_BYTES), listens=bytes(NONCE_BYTES))
        sends, receives, decoder = session.channel(Role.CONNECTS), session.channel(Role.LISTENS), Decoder(5000)
        bodies = [rng.randbytes(rng.choice((0, 1, 30, 300, 4096))) for _ in range(rng.choice((1, 3, 20)))]
        whole = b"".join(sends.seal(body) + body for body in bodies)
        stream = _changed(rng, whole, sends, receives) if rng.random() < 0.9 else whole
        sent += len(bodies)
        got: list[bytes] = []
        rest = stream
        try:
            while rest:
                size = rng.choice((1, 3, 100, 10_000))
                got += map(receives.open, decoder.bodies(rest[:size]))
                rest = rest[size:]
                assert decoder.buffered_bytes <= 5004
        except ProtocolError as error:
            refused, longest = refused + 1, max(longest, len(str(error)))
        else:
            assert decoder.buffered_bytes or whole.startswith(stream)
        read += len(got)
        assert got == bodies[: len(got)]
    assert longest < _LONGEST_REASON
    say(f"sealed frames: {sent} sent, {read} read, {refused} streams refused")


def _changed(rng: random.Random, whole: bytes, sends: SecureChannel, receives: SecureChannel) -> bytes:
    changed = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3))):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 4, 28, 60))
        match rng.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = rng.randbytes(size)
            case 3:
                changed[at:at] = changed[: rng.randrange(len(changed) + 1)]
            case 4:
                del changed[at:]
            case 5:
                changed[at:at] = receives.seal(b"back") + b"back"
            case _:
                changed[0:0] = sends.seal(b"early") + b"early"
    return bytes(changed)


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
        newcomer.ask(m.Hello("fuzz", m.Rules(1, 1), "i1", "host2", session=1))
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
