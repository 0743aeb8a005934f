"""A launcher's connection to a coordinator, as a test uses it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from megatron_ft.job.coordination import Coordination
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.actions import CoordinatorEffect
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secure_channel import Handshake
from megatron_ft.link.wire import LENGTH_BYTES, Decoder, decode, encode

__all__ = ["BOUND_S", "Ear", "Listened", "Peer", "coordination", "sockets", "until"]

BOUND_S = 20.0


class Listened(Coordinator):
    """A coordinator's machine that notes what it has heard, and which connections have ended."""

    def __init__(self, defined: m.JobDefinition) -> None:
        super().__init__("c", defined, now_s=time.monotonic(), parts=LEADER_PARTS)
        self.messages: list[m.FromMember] = []
        self.ends: list[dict[str, bool]] = []

    def heard(self, link: int, message: m.FromMember, now_s: float) -> list[CoordinatorEffect]:
        self.messages.append(message)
        return super().heard(link, message, now_s)

    def broken(self, link: int, now_s: float, **how: bool) -> list[CoordinatorEffect]:
        self.ends.append(how)
        return super().broken(link, now_s, **how)


class Ear:
    """In place of a member: writes down what a connection says."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.heard_messages: list[m.ToMember] = []
        self.problem, self.was_reached = "", False
        self.alarm_s = time.monotonic() + 1e6

    def _note(self, what: Any) -> list[Any]:
        self.told.append(what)
        return []

    def opened(self, _now_s: float) -> list[Any]:
        self.was_reached = True
        return self._note("opened")

    def broken(self, _now_s: float, problem: str = "") -> list[Any]:
        self.problem = problem
        return self._note("failed" if problem else "broken")

    def heard(self, message: m.ToMember, _now_s: float) -> list[Any]:
        self.heard_messages.append(message)
        return self._note(message)


def coordination(reactor: Reactor, member: Any, secret: bytes | None = None, **more: Any) -> Coordination:
    values = {"open_store": lambda: "here:1", "say": lambda _text: None, "on_decision": lambda _decision: None, **more}
    return Coordination(member, reactor=reactor, secret=secret, **values)


class Peer:
    """The other end of a connection, as a test plays it: a launcher without a secret, or a stranger."""

    def __init__(self, sock: socket.socket, *, connects: bool = True) -> None:
        sock.setblocking(False)
        self._sock, self._decoder, self._handshake = sock, Decoder(), Handshake(None, connects=connects)
        self._waiting: list[bytes] = []
        self.is_open = True
        sock.send(encode(self._handshake.first()))

    def fileno(self) -> int:
        return self._sock.fileno()

    def write(self, *frames: bytes) -> None:
        """Send frames that are small enough to fit, once both ends have shaken hands."""
        if (channel := self._handshake.channel) is not None:
            frames = tuple(channel.seal(each[LENGTH_BYTES:]) + each[LENGTH_BYTES:] for each in frames)
            assert self._sock.send(b"".join(frames)) == sum(map(len, frames))
        else:
            self._waiting += frames

    def read(self) -> list[Raw]:
        """Return the messages that are complete now."""
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.is_open, messages = bool(data), []
        for body in self._decoder.bodies(data):
            if (channel := self._handshake.channel) is not None:
                messages.append(decode(channel.open(body)))
                continue
            if (answer := self._handshake.answer(decode(body))) is not None:
                self._sock.send(encode(answer))
            if self._handshake.channel is not None:
                self.write(*self._waiting)
        return messages

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def sockets(reactor: Reactor, secret: bytes | None = None) -> Iterator[tuple[Coordination, Ear]]:
    ear = Ear()
    made = coordination(reactor, ear, secret)
    try:
        yield made, ear
    finally:
        made.close()
        made.close()  # twice is fine


def until(reactor: Reactor, condition: Any) -> None:
    end_s = time.monotonic() + BOUND_S
    while not reactor.run_until(condition, time.monotonic() + 0.05):  # another thread, which wakes nobody, may meet it
        assert time.monotonic() < end_s
