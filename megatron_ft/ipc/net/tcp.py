"""TCP connections between hosts for the messages of `ipc.wire`: never blocking, and quick to detect a dead peer.

Bytes that a peer doesn't take at once are kept, up to a limit; a slower peer is dropped.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ft.core.codec import Raw
from megatron_ft.core.errors import ProtocolError
from megatron_ft.ipc.net.secure_channel import SEAL_BYTES, FrameError, SecureChannel
from megatron_ft.ipc.wire import LENGTH_BYTES, MAX_MESSAGE_BYTES, Decoder, decode

_CHUNK = 1 << 16
_MOST_UNSENT = 8 << 20
_CONNECT_S = 3.0
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)
"""Seconds, except for the last in milliseconds: a host that is off or cut off ends the connection after 5 s. A listener
has them for the connections that it accepts."""
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Errors of such an end; the last two if the network has reported in the meantime that the host is unreachable."""

Target = tuple[int, int, int, str, Any]
"""One address of a host, as returned by ``socket.getaddrinfo``."""


class Peer:
    """One end of a connection. Call ``flush`` until no ``unsent`` bytes are left.

    At most one frame and one read of the other end's bytes are kept.
    """

    def __init__(self, sock: socket.socket, *, allowance: int | None = None) -> None:
        """``allowance``: bytes that the other end may send in all before `secure`; None: no limit."""
        sock.setblocking(False)
        self.sock = sock
        self.unsent = bytearray()
        self.is_open = True
        self.is_silent = False
        """True if the connection ended because its host answers no packet."""
        self.is_reset = False
        """True if the connection was reset on the way, or given up here: the other side hasn't closed it."""
        self._allowance = allowance
        self._decoder = Decoder(MAX_MESSAGE_BYTES + SEAL_BYTES)
        self._channel: SecureChannel | None = None

    def secure(self, channel: SecureChannel) -> None:
        """Seal all frames written from now on, and open those that follow the last one read."""
        self._channel, self._allowance = channel, None

    def fileno(self) -> int:
        return self.sock.fileno()

    def write(self, frame: bytes) -> int:
        """Queue one frame of `ipc.wire.encode`. Return the number of bytes on the wire.

        A peer with too many unsent bytes is given up.
        """
        if not self.is_open:
            return 0
        before = len(self.unsent)
        if self._channel is None:
            self.unsent += frame
        else:
            body = memoryview(frame)[LENGTH_BYTES:]
            self.unsent += self._channel.seal(body)
            self.unsent += body
        added = len(self.unsent) - before
        if len(self.unsent) > _MOST_UNSENT:
            self.give_up()
        return added

    def flush(self) -> bool:
        """Send what can be sent now. Return True if all is sent."""
        if self.unsent and self.is_open:
            try:
                sent = self.sock.send(self.unsent)
                del self.unsent[:sent]
            except BlockingIOError:
                pass  # the selector reports when there is room again
            except OSError as error:
                self._failed(error)
        return not self.unsent

    def read(self) -> list[Raw]:
        """Return the messages that are complete now. ``is_open`` is False afterwards if no more will come.

        Raises:
            ProtocolError: the peer doesn't speak the protocol.
        """
        return [decode(body) for body in self.read_bodies()]

    def read_bodies(self) -> Iterator[bytes]:
        """Like `read`, but yields undecoded bodies. `secure` may be called between two of them.

        Raises:
            FrameError: a sealed frame isn't what the peer sent in this place.
            ProtocolError: the peer doesn't speak the protocol.
        """
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(error)
            return
        if not data:
            self.is_open = False
            if self._channel is not None and self._decoder.buffered_bytes:
                raise FrameError("the connection ended within a frame")
        if self._allowance is not None:
            self._allowance -= len(data)
            if self._allowance < 0:
                raise ProtocolError("too many bytes before the proof of the secret")
        try:
            for body in self._decoder.bodies(data):
                yield body if self._channel is None else self._channel.open(body)
        except ProtocolError as error:
            raise error if self._channel is None else FrameError(str(error)) from None

    def _failed(self, error: OSError) -> None:
        self.is_silent |= error.errno in _SILENCE  # the kernel reports it once; a later error says less
        self.is_reset |= error.errno == errno.ECONNRESET
        self.is_open = False

    def give_up(self) -> None:
        """Send nothing more; the owner closes the connection."""
        self.is_reset |= self.is_open
        self.is_open = False

    def close(self) -> None:
        self.is_open = False
        self.sock.close()


def listen(host: str, port: int, *, backlog: int = 65535) -> socket.socket:
    """Return a listening socket; with an empty ``host`` on all addresses: IPv4, and IPv6 if available.

    Raises:
        OSError: the address can't be used.
    """
    is_everywhere = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_everywhere or ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_options(sock)
        if is_everywhere:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket) -> None:
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)


def look_up(host: str, port: int) -> list[Target]:
    """Return all addresses of a host. Waits for name servers, unless it is an address.

    Raises:
        OSError: there are none.
    """
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host: {error}") from None


def connect(host: str, port: int, first: Sequence[Target] = ()) -> socket.socket:
    """Return a connection to a host. Waits for a name server, and 3 s for each address that is silent.

    Args:
        first: addresses to try before the name is looked up.

    Raises:
        OSError: no process listens there; a ``socket.gaierror`` if the host isn't known.
    """
    problem = OSError("the host name has no address")
    for looks_up in (False, True):
        for family, kind, protocol, _, address in look_up(host, port) if looks_up else first:
            sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                _set_options(sock)
                sock.settimeout(_CONNECT_S)
                sock.connect(address)
                if (
                    sock.getpeername() == sock.getsockname()
                ):  # by chance the port that it connects to: it reaches itself
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                return sock
            except OSError as error:
                sock.close()
                problem = error
    raise problem


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[host]:port`` or ``host``, whose port is 0.

    Raises:
        ProtocolError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, "0"
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise ProtocolError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """Format an address for ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
