"""The connection to a coordinator on another host, or in another process of this one: TCP, on the launcher's loop."""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from megatron_ft.core.codec import Vocabulary
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.job.messages import Dismiss, FromMember, ToMember
from megatron_ft.core.messages.secret_messages import HANDSHAKE, Challenge, Handshake
from megatron_ft.core.rate_limiter import RateLimiter
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import HANDSHAKE_BYTES, LauncherHandshake, SecretError
from megatron_ft.ipc.net.secure_channel import FrameError, Role
from megatron_ft.ipc.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, VersionError, decode, encode
from megatron_ft.launcher.coordination.host_addresses import HostAddresses
from megatron_ft.launcher.coordination.transport import Listener
from megatron_ft.link.reactor import Reactor, Timer

_TO_MEMBER: Vocabulary[ToMember | Challenge] = Vocabulary(ToMember | Challenge)
"""``Challenge``: from one that has a secret, where this launcher has none."""


_RESET = struct.pack("ii", 1, 0)


class CoordinatorConnection:
    """TCP. A name that has to be looked up, and every try to connect, costs the loop nothing."""

    def __init__(
        self,
        reactor: Reactor,
        secret: bytes | None,
        listener: Listener,
        *,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """``say``: gets a line for the user when a process without the secret interferes with a connection."""
        self._say = say
        self._limiter = RateLimiter()
        self._was_let_in = False
        """A coordinator has proved that it knows the secret: it is no mistake of the user if another process can't."""
        self._reactor = reactor
        self._secret = secret
        self._listener = listener
        self.looking_up: set[str] = set()
        """Addresses whose host's name is being looked up, each in a thread: a name server may be silent for minutes."""
        self._address = ""
        """Address of the connection, made or in progress; empty if none."""
        self._hosts = HostAddresses()
        self._targets: list[tcp.Target] = []
        """Addresses of that host that are still to be tried."""
        self._are_remembered = False
        """True if the targets are from an earlier look-up or connection."""
        self._target: tcp.Target | None = None
        """Target of the connection, made or in progress."""
        self._is_answered = False
        """A coordinator has answered there, and hasn't refused this launcher."""
        self._problem = ""
        """Why the last one couldn't be connected to."""
        self._is_resolved = False
        """The host's name is known."""
        self.peer: tcp.Peer | None = None
        self._handshake: LauncherHandshake | None = None
        """Handshake of the connection; None until it is made."""
        self._waits_for_room = False
        self._soon: Timer | None = None

    # -- what is asked for ------------------------------------------------------------------------------------

    def connect(self, address: str) -> None:
        self.disconnect()
        self._address = address
        try:
            host, port = tcp.parse_address(address)
        except ProtocolError as error:
            self._problem = str(error)
            self._say_soon(self._fail)
            return
        self._problem, self._is_resolved = "the host name has no address", False
        try:
            self._targets = tcp.look_up(host, port, is_number=True)
        except OSError:
            self._targets = self._hosts.take(address, time.monotonic())
            self._are_remembered = True
        self._try_next()

    def disconnect(self) -> None:
        self._disconnect(resets=True)

    def _disconnect(self, *, resets: bool) -> None:
        if self._soon is not None:
            self._soon.cancel()
        # the connection has ended, or the attempt is given up; not where the attempt has failed
        target, self._target = self._target, None
        is_answered, self._is_answered = self._is_answered, False
        if target is not None and is_answered:
            self._hosts.remember(self._address, [target], time.monotonic())
        elif target is not None:
            self._hosts.silent(self._address, target)
        self._address, self._targets, self._are_remembered, self._soon = "", [], False, None
        self._drop_peer(resets=resets)

    def transmit(self, message: FromMember) -> None:
        if self.peer is not None and self._handshake is not None and self._handshake.is_done:
            self._send(encode(message))

    def close(self, within_s: float = 0.5) -> None:
        peer = self.peer
        if peer is not None and self._handshake is not None:
            _flush_within(peer, within_s)
        self._disconnect(resets=False)

    # -- connecting -------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        address = self._address
        if address in self.looking_up:
            return
        look_up = functools.partial(tcp.look_up, *tcp.parse_address(address))
        try:
            self._reactor.call_in_thread(look_up, functools.partial(self._looked_up, address))
        except (OSError, RuntimeError) as error:  # no descriptor is free, or no thread
            self._problem = str(error)
            self._say_soon(self._fail)
        else:
            self.looking_up.add(address)

    def _looked_up(self, address: str, targets: Callable[[], list[tcp.Target]]) -> None:
        self.looking_up.discard(address)
        is_awaited = address == self._address and self.peer is None and self._soon is None
        try:
            found = targets()
        except OSError as error:
            if is_awaited:
                self._problem = f"the host name cannot be resolved: {error.strerror or error}"
                self._try_next()
            return
        if is_awaited:
            self._targets = self._hosts.in_order(address, found)
            self._try_next()
        else:
            self._hosts.remember(address, found, time.monotonic())

    def _try_next(self) -> None:
        while self._targets:
            self._target, self._is_resolved = self._targets.pop(0), True
            try:
                self.peer = tcp.begin(self._target, allowance=None if self._secret is None else HANDSHAKE_BYTES)
            except OSError as error:
                self._problem = os.strerror(error.errno or errno.EIO)
                self._target = None
                continue
            self._reactor.watch(self.peer.fileno(), self._served)
            self._reactor.watch_room(self.peer.fileno(), True)
            self._waits_for_room = True
            return
        if self._are_remembered:
            self._are_remembered = False
            self._look_up()
        else:
            self._say_soon(self._fail)

    def _fail(self) -> None:
        self.disconnect()
        self._listener.failed(self._problem, is_unowned=self._is_resolved)

    def _say_soon(self, callback: Callable[[], None]) -> None:
        if self._soon is None:
            self._soon = self._reactor.call_later(0.0, callback)

    def _served(self) -> None:
        """The socket can be read, has room, or has failed."""
        peer = self.peer
        assert peer is not None
        if self._handshake is None:
            if problem := _failure(peer.sock):
                self._problem = os.strerror(problem)
                self._target = None
                self._drop_peer()
                self._try_next()
                return
            self._connected()
        if self.peer is peer:
            self._flush()
            self._read(peer)

    def _connected(self) -> None:
        self._handshake = LauncherHandshake(self._secret)
        self._is_answered = False
        first = self._handshake.first()
        if first is not None:
            self._send(encode(first))
        else:
            self._listener.opened()

    # -- connected --------------------------------------------------------------------------------------------

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
        if not peer.is_open:
            self._say_soon(functools.partial(self._ended, peer))

    def _read(self, peer: tcp.Peer) -> None:
        for tell in self._heard(peer):
            tell()
            if self.peer is not peer:
                return
        if not peer.is_open:
            self._ended(peer)

    def _heard(self, peer: tcp.Peer) -> Iterator[Callable[[], None]]:
        """Yield calls of the listener, one by one. An error raised by the listener isn't the other end's."""
        try:
            for body in peer.read_bodies():
                tell = self._understood(body)
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

    def _understood(self, body: bytes) -> Callable[[], None] | None:
        """Return the call of the listener for a message, if any.

        Raises:
            ProtocolError: no coordinator says that, or none of this job.
        """
        handshake, message = self._handshake, decode(body)
        assert handshake is not None
        heard: ToMember | Handshake = _TO_MEMBER.parse(message) if handshake.is_done else HANDSHAKE.parse(message)
        if isinstance(heard, ToMember):
            self._is_answered = not isinstance(heard, Dismiss)
            return functools.partial(self._listener.heard, heard)
        answer = handshake.answer(heard)
        if answer is not None:
            self._send(encode(answer))
        if handshake.session is None:
            return None
        peer = self.peer
        assert peer is not None
        peer.secure(handshake.session.channel(Role.CONNECTS, MAX_MESSAGE_BYTES))
        self._was_let_in = True
        return self._listener.opened

    def _ended(self, peer: tcp.Peer) -> None:
        if peer is not self.peer:
            return
        self.disconnect()
        self._listener.broken()

    def _refuse(self, text: str) -> None:
        address, is_proven = self._address, self._handshake is not None and self._handshake.is_done
        self.disconnect()
        if self._was_let_in and not is_proven:
            # any process can say that: it ends no launcher that has met a coordinator of its job
            self._say_seldom(f"the coordinator at {address} {text}; looking for another one")
            self._listener.failed(text, is_unowned=False)
        else:
            self._listener.refused(f"the coordinator at {address} {text}")

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)

    def _drop_peer(self, *, resets: bool = False) -> None:
        """Close the connection. ``resets``: so that the leader doesn't take this launcher for one that has exited."""
        peer, self.peer, self._handshake, self._waits_for_room = self.peer, None, None, False
        if peer is not None:
            self._reactor.unwatch(peer.fileno())
            peer.flush()
            if resets:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            peer.close()


def _failure(sock: socket.socket) -> int:
    """Why a connection that was being made hasn't come about, as an errno; 0 if it has."""
    try:
        if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return error
        # if no process listens there, a socket may by chance get the very port that it connects to, and reach itself
        return errno.ECONNREFUSED if sock.getpeername() == sock.getsockname() else 0
    except OSError as error:
        return error.errno or errno.EIO


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
