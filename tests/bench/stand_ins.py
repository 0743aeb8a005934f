"""Stand-ins for launchers, as thin as can be: what they say is prepared, and what thousands hear alike is read once.

They know how a job without mishaps goes, and nothing more: meet, end the ranks (there are none) when told, meet again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator

from megatron_ft.job.parts import SAID_BY_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, DecisionKind
from megatron_ft.job.rules.liveness import beat_s
from megatron_ft.link import tcp
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.secure_channel import Handshake
from megatron_ft.link.wire import LENGTH_BYTES, PROTOCOL_VERSION, Decoder, decode, encode

__all__ = ["TO_MEMBER", "StandIns"]

TO_MEMBER: Vocabulary[m.ToMember] = Vocabulary(m.TO_MEMBER | SAID_BY_PARTS)
_BEAT = encode(m.Beat())
_READY = encode(m.Ready())
_DECISION = b'{"v":%d,"fds":0,"type":"assignment"' % PROTOCOL_VERSION
_CONNECTED_AT_ONCE = 100


class StandIn:
    """One of them; ``sock`` is None when it was lost."""

    def __init__(self, number: int, hello: bytes, secret: bytes | None) -> None:
        self.number = number
        self.hello = hello
        self.sock: socket.socket | None = None
        self._decoder = Decoder()
        self._handshake = Handshake(secret, connects=True)

    def connected(self) -> None:
        """Send what comes first."""
        self.send(encode(self._handshake.first()))

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Messages of the coordinator that are whole now."""
        bodies, channel = self._decoder.bodies(data), self._handshake.channel
        return bodies if channel is None else map(channel.open, bodies)

    @property
    def shakes_hands(self) -> bool:
        """The next message belongs to the handshake."""
        return self._handshake.channel is None

    def shake_hands(self, body: bytes) -> bool:
        """Answer a message of the handshake; True if the hello was sent after it."""
        answer = self._handshake.answer(decode(body))
        if answer is not None:
            self.send(encode(answer))
        if self._handshake.channel is not None:
            self.send(self.hello)
        return self._handshake.channel is not None

    def send(self, data: bytes) -> None:
        """All of it, at once."""
        assert self.sock is not None
        if (channel := self._handshake.channel) is not None:
            body = data[LENGTH_BYTES:]
            data = channel.seal(body) + body
        sent = self.sock.send(data)
        assert sent == len(data), "so few bytes always fit"


class StandIns:
    """Those with ``numbers``, of ``total``; one of all is a spare."""

    def __init__(
        self,
        address: str,
        numbers: range,
        total: int,
        *,
        secret: bytes | None = None,
    ) -> None:
        self._address = tcp.parse_address(address)
        self._total = total
        self._epoll = select.epoll()
        self._spare = total - 1
        self._all = {number: StandIn(number, self._hello(number), secret) for number in numbers}
        self._by_fd: dict[int, StandIn] = {}
        self._beats: deque[tuple[float, StandIn]] = deque()
        self._replies: dict[bytes, tuple[bytes, int]] = {}
        self._begun: dict[int, int] = {}
        self.last_s = 0.0
        """When the last of them has begun the last cycle."""

    def _hello(self, number: int) -> bytes:
        is_ready = m.NodeStatus(phase=m.NodePhase.READY)
        address = f"node{number}:29500"
        rules = m.Rules(min_nodes=self._spare, max_nodes=self._spare, max_restarts=10)
        hello = m.Hello("bench", rules, f"i{number}", f"node{number}", address, number, standing=is_ready)
        return encode(hello)

    def start(self) -> None:
        """All connect at once, and answer meanwhile: a real launcher has none but itself to connect."""
        for count, each in enumerate(self._all.values(), 1):
            each.sock = socket.socket()
            each.sock.setblocking(False)
            each.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                each.sock.connect(self._address)
            self._by_fd[each.sock.fileno()] = each
            self._epoll.register(each.sock, select.EPOLLIN | select.EPOLLOUT)
            if count % _CONNECTED_AT_ONCE == 0:
                self._serve(0.0)

    def lose(self, number: int) -> None:
        """Its process is killed."""
        each = self._all.pop(number)
        assert each.sock is not None
        del self._by_fd[each.sock.fileno()]
        each.sock.close()
        each.sock = None

    def run_until_in(self, cycle: int, bound_s: float) -> bool:
        """Serve until everybody but the spare is in that cycle; whether that came in time."""
        wanted = len(self._all) - (cycle == 0 and self._spare in self._all)
        deadline_s = time.monotonic() + bound_s
        while self._begun.get(cycle, 0) < wanted and time.monotonic() < deadline_s:
            self._serve()
        return self._begun.get(cycle, 0) >= wanted

    def run_for(self, seconds: float) -> None:
        """Serve."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self._serve()

    def _serve(self, within_s: float = 0.05) -> None:
        for fd, events in self._epoll.poll(within_s, 4096):
            each = self._by_fd[fd]
            if events & select.EPOLLOUT:
                self._epoll.modify(fd, select.EPOLLIN)
                each.connected()
                continue
            assert each.sock is not None
            data = each.sock.recv(65536)
            if not data:
                sys.exit(f"the coordinator has closed the connection of stand-in {each.number}")
            for body in each.bodies(data):
                self._heard(each, body)
        now_s = time.monotonic()
        while self._beats and self._beats[0][0] <= now_s:
            _, each = self._beats.popleft()
            if each.sock is not None:
                each.send(_BEAT)
                self._beats.append((now_s + beat_s(self._total), each))

    def _heard(self, each: StandIn, body: bytes) -> None:
        if each.shakes_hands:
            if each.shake_hands(body):
                self._beats.append((time.monotonic() + beat_s(self._total), each))
            return
        known = body[: body.rindex(b'"place":')] if body.startswith(_DECISION) and b'"place":' in body else body
        found = self._replies.get(known)
        if found is None:
            found = self._replies[known] = self._reply(body)
        reply, cycle = found
        if cycle >= 0 and not (cycle == 0 and each.number == self._spare):
            self._begun[cycle] = self._begun.get(cycle, 0) + 1
            self.last_s = time.monotonic()
        if reply:
            each.send(reply)

    def _reply(self, body: bytes) -> tuple[bytes, int]:
        """What to say in return, and the cycle that begins."""
        match TO_MEMBER.parse(decode(body)):
            case m.Beat(number) if number:
                return encode(m.Beat(number)), -1
            case Assignment(decision, place) if decision.kind is DecisionKind.START and place is not None:
                return b"", decision.cycle
            case m.End():
                return _READY, -1
        return b"", -1
