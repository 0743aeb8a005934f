"""The connection to a coordinator on another host, or in another process of this one: TCP, on the launcher's loop."""

from __future__ import annotations

import functools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from megatron_ft.core.codec import Vocabulary
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages.secret_messages import HANDSHAKE, Challenge, Handshake
from megatron_ft.core.rate_limiter import RateLimiter
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import HANDSHAKE_BYTES, LauncherHandshake, SecretError
from megatron_ft.ipc.net.secure_channel import FrameError, Role
from megatron_ft.ipc.wire import PROTOCOL_VERSION, VersionError, decode, encode
from megatron_ft.job.parts import SAID_BY_PARTS
from megatron_ft.job.rules.messages import REFUSED, TO_MEMBER, Admitted, Dismiss, FromMember, ToMember
from megatron_ft.link.reactor import Reactor, Timer

_TO_MEMBER: Vocabulary[ToMember | Challenge] = Vocabulary(TO_MEMBER | Challenge | SAID_BY_PARTS)
"""``Challenge``: from one that has a secret, where this launcher has none."""
_RESET = struct.pack("ii", 1, 0)


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
    """TCP. A thread looks up the host's name and connects: a name server may be silent for minutes.

    Args:
        say: gets a line for the user when a process without the secret interferes with a connection.
    """

    def __init__(
        self,
        reactor: Reactor,
        secret: bytes | None,
        listener: Listener,
        *,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._reactor, self._secret, self._listener, self._say = reactor, secret, listener, say
        self._limiter = RateLimiter()
        self._was_let_in = False
        """A coordinator has proved that it knows the secret: it is no mistake of the user if another process can't."""
        self._address = ""
        """Address of the connection, made or in progress; empty if none."""
        self.connecting: set[str] = set()
        """Addresses to which a thread connects."""
        self._known: dict[str, tcp.Target] = {}
        """The last address of each host, by ``host:port``; it is used once, as the host may have moved."""
        self.peer: tcp.Peer | None = None
        self._handshake = LauncherHandshake(secret)
        self._waits_for_room = False
        self._soon: Timer | None = None

    def connect(self, address: str) -> None:
        """Connect to ``host:port``, and give up the connection before. The listener is told how that went."""
        self.disconnect()
        self._address = address
        if address in self.connecting:
            return  # what an earlier attempt has begun is for this one
        known = [target] if (target := self._known.pop(address, None)) else []
        try:
            connect = functools.partial(tcp.connect, *tcp.parse_address(address), known)
            self._reactor.call_in_thread(connect, functools.partial(self._connected, address))
        except (ProtocolError, OSError, RuntimeError) as error:  # the last two: no descriptor is free, or no thread
            self._soon = self._reactor.call_later(0.0, functools.partial(self._fail, str(error)))
        else:
            self.connecting.add(address)

    def disconnect(self) -> None:
        """Give up the connection, which may be resumed: the other end sees a reset. No call of the listener follows."""
        self._disconnect(resets=True)

    def transmit(self, message: FromMember) -> None:
        """Send a message, if the connection is open."""
        if self.peer is not None and self._handshake.is_done:
            self._send(encode(message))

    def close(self, within_s: float = 0.5) -> None:
        """Give it up for good; what is unsent has ``within_s`` seconds to go."""
        if self.peer is not None:
            _flush_within(self.peer, within_s)
        self._disconnect(resets=False)

    def _disconnect(self, *, resets: bool) -> None:
        """``resets``: the leader isn't to take this launcher for one that has exited."""
        if self._soon is not None:
            self._soon.cancel()
        peer, self.peer, self._address, self._soon, self._waits_for_room = self.peer, None, "", None, False
        if peer is not None:
            self._reactor.unwatch(peer.fileno())
            peer.flush()
            if resets:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            peer.close()

    def _connected(self, address: str, result: Callable[[], socket.socket]) -> None:
        """The thread has ended. Its connection may come too late for the attempt that wanted it."""
        self.connecting.discard(address)
        is_awaited = address == self._address and self._soon is None
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
            self._know(address, sock)
            sock.close()
            return
        self.peer = peer = tcp.Peer(sock, allowance=None if self._secret is None else HANDSHAKE_BYTES)
        self._reactor.watch(peer.fileno(), self._served)
        self._handshake = LauncherHandshake(self._secret)
        first = self._handshake.first()
        if first is not None:
            self._send(encode(first))
        else:
            self._listener.opened()

    def _know(self, address: str, sock: socket.socket) -> None:
        self._known[address] = (sock.family, sock.type, 0, "", sock.getpeername())

    def _fail(self, problem: str, *, is_unowned: bool = False) -> None:
        self.disconnect()
        self._listener.failed(problem, is_unowned=is_unowned)

    # -- connected --------------------------------------------------------------------------------------------

    def _served(self) -> None:
        """The socket can be read, or has room."""
        peer = self.peer
        assert peer is not None
        self._flush()
        for tell in self._heard(peer):
            tell()
            if self.peer is not peer:
                return
        if not peer.is_open:
            self._ended(peer)

    def _send(self, data: bytes) -> None:
        assert self.peer is not None
        self.peer.write(data)
        self._flush()

    def _flush(self) -> None:
        peer = self.peer
        assert peer is not None
        waits = not peer.flush() and peer.is_open
        if waits is not self._waits_for_room:
            self._waits_for_room = waits
            self._reactor.watch_room(peer.fileno(), waits)
        if not peer.is_open and self._soon is None:
            self._soon = self._reactor.call_later(0.0, functools.partial(self._ended, peer))

    def _heard(self, peer: tcp.Peer) -> Iterator[Callable[[], None]]:
        """Yield calls of the listener, one by one. An error raised by the listener isn't the other end's."""
        try:
            for body in peer.read_bodies():
                tell = self._understood(peer, body)
                if tell is not None:
                    yield tell
        except VersionError as error:
            ours = f"this launcher version {PROTOCOL_VERSION}: all nodes need the same megatron_ft"
            self._refuse(f"speaks version {error.theirs} of the protocol, {ours}")
        except SecretError as error:
            self._refuse(str(error))
        except FrameError as error:
            self._say_seldom(f"closed the connection to the coordinator at {self._address}: {error}")
            peer.give_up()
        except ProtocolError:
            peer.give_up()  # it is no coordinator

    def _understood(self, peer: tcp.Peer, body: bytes) -> Callable[[], None] | None:
        """Return the call of the listener for a message, if any.

        Raises:
            ProtocolError: no coordinator says that, or none of this job.
        """
        handshake, message = self._handshake, decode(body)
        heard: ToMember | Handshake = _TO_MEMBER.parse(message) if handshake.is_done else HANDSHAKE.parse(message)
        if isinstance(heard, ToMember):
            if isinstance(heard, Admitted):
                self._know(self._address, peer.sock)
            return functools.partial(self._listener.heard, heard)
        answer = handshake.answer(heard)
        if answer is not None:
            self._send(encode(answer))
        if handshake.session is None:
            return None
        peer.secure(handshake.session.channel(Role.CONNECTS))
        self._was_let_in = True
        return self._listener.opened

    def _ended(self, peer: tcp.Peer) -> None:
        if peer is self.peer:
            self.disconnect()
            self._listener.broken()

    def _refuse(self, text: str) -> None:
        address, is_proven = self._address, self._handshake.is_done
        self.disconnect()
        if self._was_let_in and not is_proven:
            # any process can say that: it ends no launcher that has met a coordinator of its job
            self._say_seldom(f"the coordinator at {address} {text}; looking for another one")
            self._listener.failed(text, is_unowned=False)
        else:
            self._listener.heard(Dismiss(REFUSED, f"the coordinator at {address} {text}"))

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)


def _flush_within(peer: tcp.Peer, within_s: float) -> None:
    """Have what is unsent sent, in bounded time."""
    until_s = time.monotonic() + within_s
    poller = select.poll()
    poller.register(peer.fileno(), select.POLLOUT)
    while not peer.flush() and peer.is_open and (left_s := until_s - time.monotonic()) > 0:
        poller.poll(left_s * 1000)
    try:
        peer.sock.shutdown(socket.SHUT_WR)
        while peer.sock.recv(1 << 16):
            pass  # to close with something unread would drop what the other end hasn't got yet
    except OSError:
        pass  # nothing more is there to read, or the connection has ended
