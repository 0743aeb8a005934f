"""A launcher's connection to the coordinator: the one that is wanted now, made by a thread, and used by the loop."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from typing import Protocol

from megatron_ft.errors import ProtocolError
from megatron_ft.job.connection import Connection, parse
from megatron_ft.job.parts import SAID_BY_PARTS
from megatron_ft.job.rules.messages import REFUSED, TO_MEMBER, Dismiss, FromMember, ToMember
from megatron_ft.link import tcp
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.secret import SecretError
from megatron_ft.link.secure_channel import FrameError, Role
from megatron_ft.link.wire import PROTOCOL_VERSION, VersionError, encode

_TO_MEMBER: Vocabulary[ToMember] = Vocabulary(TO_MEMBER | SAID_BY_PARTS)
Dial = Callable[[str, int], socket.socket]


class Listener(Protocol):
    """Is called with what happens to a connection: from the launcher's loop, never from inside the connection's own
    methods."""

    def opened(self) -> None:
        """Connected, and the coordinator has proved the secret, if there is one."""

    def failed(self, problem: str, *, is_unowned: bool = True) -> None:
        """The connection can't be made. ``is_unowned``: no process is there; False also if the host isn't known."""

    def broken(self) -> None:
        """Disconnected."""

    def heard(self, message: ToMember) -> None:
        """A message of the coordinator; `Dismiss` also where its secret or version is another one."""


class CoordinatorConnection:
    """A thread looks up the host's name and connects: a name server may be silent for minutes.

    Args:
        say: gets a line for the user when a process without the secret interferes with a connection.
        dial: connects to a host and a port.
    """

    def __init__(
        self,
        reactor: Reactor,
        secret: bytes | None,
        listener: Listener,
        *,
        say: Callable[[str], None] = lambda _text: None,
        dial: Dial = tcp.connect,
    ) -> None:
        self._reactor, self._secret, self._listener, self._say, self._dial = reactor, secret, listener, say, dial
        self._limiter = RateLimiter()
        self._was_let_in = False
        """A coordinator has proved that it knows the secret: it is no mistake of the user if another process can't."""
        self._address = ""
        """Address of the connection, made or in progress; empty if none."""
        self.connecting: set[str] = set()
        """Addresses to which a thread connects."""
        self.connection: Connection[ToMember] | None = None
        self._failure: Timer | None = None

    def connect(self, address: str) -> None:
        """Connect to ``host:port``, and give up the connection before. The listener is told how that went."""
        self.disconnect()
        self._address = address
        if address in self.connecting:
            return  # what an earlier attempt has begun is for this one
        try:
            dial = functools.partial(self._dial, *tcp.parse_address(address))
            self._reactor.call_in_thread(dial, functools.partial(self._connected, address))
        except (ProtocolError, OSError, RuntimeError) as error:  # the last two: no descriptor is free, or no thread
            self._failure = self._reactor.call_later(0.0, functools.partial(self._fail, str(error)))
        else:
            self.connecting.add(address)

    def disconnect(self) -> None:
        """Give up the connection, which may be resumed: the other end sees a reset. No call of the listener follows."""
        self.close(resets=True, within_s=0.0)

    def transmit(self, message: FromMember) -> None:
        """Send a message, if the connection is open."""
        if self.connection is not None and self.connection.is_proven:
            self.connection.send(encode(message))

    def close(self, within_s: float = 0.5, *, resets: bool = False) -> None:
        """Give it up for good; what is unsent has ``within_s`` seconds to go."""
        connection, self.connection, self._address = self.connection, None, ""
        if self._failure is not None:
            self._failure.cancel()
            self._failure = None
        if connection is not None:
            connection.close(resets=resets, within_s=within_s)

    def _connected(self, address: str, result: Callable[[], socket.socket]) -> None:
        """The thread has ended. Its connection may come too late for the attempt that wanted it."""
        self.connecting.discard(address)
        is_awaited = address == self._address and self._failure is None
        try:
            sock = result()
        except OSError as error:
            if is_awaited:
                is_unknown = isinstance(error, socket.gaierror)
                problem = error.strerror or str(error)
                text = f"the host name cannot be resolved: {problem}" if is_unknown else problem
                self._fail(text, is_unowned=not is_unknown)
            return
        if not is_awaited:
            sock.close()
            return
        self.connection = Connection(
            *(self._reactor, sock),
            secret=self._secret,
            role=Role.CONNECTS,
            parse=functools.partial(parse, _TO_MEMBER),
            proven=self._proven,
            heard=self._listener.heard,
            ended=self._ended,
        )
        if self._secret is None:
            self._listener.opened()

    def _fail(self, problem: str, *, is_unowned: bool = False) -> None:
        self.disconnect()
        self._listener.failed(problem, is_unowned=is_unowned)

    def _proven(self) -> None:
        self._was_let_in = True
        self._listener.opened()

    def _ended(self, problem: ProtocolError | None) -> None:
        assert self.connection is not None
        address, is_proven = self._address, self.connection.is_proven
        self.disconnect()
        if isinstance(problem, VersionError):
            ours = f"this launcher version {PROTOCOL_VERSION}: all nodes need the same megatron_ft"
            problem = SecretError(f"speaks version {problem.theirs} of the protocol, {ours}")
        if isinstance(problem, FrameError):
            self._say_seldom(f"closed the connection to the coordinator at {address}: {problem}")
        if not isinstance(problem, SecretError):
            self._listener.broken()  # it has ended, or it is no coordinator
        elif self._was_let_in and not is_proven:
            # any process can say that: it ends no launcher that has met a coordinator of its job
            self._say_seldom(f"the coordinator at {address} {problem}; looking for another one")
            self._listener.failed(str(problem), is_unowned=False)
        else:
            self._listener.heard(Dismiss(REFUSED, f"the coordinator at {address} {problem}"))

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)
