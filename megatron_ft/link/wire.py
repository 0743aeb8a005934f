"""Messages between this package's processes: length-prefixed JSON over a Unix socket, with file descriptors.

A message is a JSON object behind a 4-byte big-endian length; it has the protocol version, and under ``fds`` the number
of descriptors that travel with it. Nothing is ever unpickled. Peers of other users are refused.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ft.errors import FaultToleranceError, ProtocolError
from megatron_ft.link.base import codec
from megatron_ft.link.base.codec import Count, Fact, Message, Raw, encode_as, name_of
from megatron_ft.link.linux.processes import wait_ready

PROTOCOL_VERSION = 12
MAX_MESSAGE_BYTES = 1 << 20
SOCKET_PATH_LIMIT = 107  # sun_path of Linux, less the final zero
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
MAX_FDS = 8
"""Descriptors that one message may carry; more are sent in several messages."""
_CHUNK = 1 << 16
_PICKLE = b"\x80"
_OF_THE_REFERENCE = (
    "it sends pickles, as the client of nvidia-resiliency-ext does: have its script import RankMonitorClient from "
    "megatron_ft, or start it with --ft-reference-names on (the default), in a Python that reads PYTHONPATH"
)


class _FrameHead(Message, frozen=True):
    v: Count
    fds: int = 0
    type: str | None = None


class ChannelClosedError(FaultToleranceError):
    """Raised once the peer is gone."""


class VersionError(ProtocolError):
    """Raised if the peer speaks another version of the protocol."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"message is of protocol version {theirs}, not {PROTOCOL_VERSION}")
        self.theirs = theirs


class Received(NamedTuple):
    """A message and its descriptors; the receiver closes them."""

    message: Raw
    fds: tuple[int, ...]


def encode(message: Message | Fact | Mapping[str, Any], fd_count: int = 0) -> bytes:
    """Encode one message, or a mapping in place of one."""
    body = encode_as(_head(type(message), fd_count), message)
    assert len(body) <= MAX_MESSAGE_BYTES, len(body)
    return _LENGTH.pack(len(body)) + body


@functools.cache
def _head(kind: Any, fd_count: int) -> bytes:
    name = b"" if issubclass(kind, Mapping) else b',"type":"%b"' % name_of(kind).encode()
    return b'{"v":%d,"fds":%d%b' % (PROTOCOL_VERSION, fd_count, name)


class Decoder:
    """Splits a stream of bytes into messages of at most ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the messages that are complete now, for ``decode``.

        Raises:
            ProtocolError: a message is too long; nothing after it can be read.
        """
        if not self._buffer and data[: _LENGTH.size] == _LENGTH.pack(max(0, len(data) - _LENGTH.size)):
            if len(data) <= self.max_bytes:  # fast path: exactly one message
                yield data[_LENGTH.size :]
                return
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise ProtocolError(f"message of {length} bytes, at most {self.max_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def decode(body: bytes) -> Raw:
    """Decode the name of one message, which comes without its length; a `Vocabulary` decodes the rest.

    Raises:
        ProtocolError: the bytes aren't a message of this protocol.
    """
    if body[:1] == _PICKLE:
        raise ProtocolError(_OF_THE_REFERENCE)
    try:
        head = codec.decode(_FrameHead, body)
    except ProtocolError as error:
        raise ProtocolError(f"message is not of protocol version {PROTOCOL_VERSION}: {error}") from None
    if head.v != PROTOCOL_VERSION:
        raise VersionError(head.v)
    if not 0 <= head.fds <= MAX_FDS or head.type is None:
        raise ProtocolError("message has no valid 'type' or 'fds'")
    return Raw(head.type, body, head.fds)


class Channel:
    """One end of a connection. Never blocks longer than asked."""

    def __init__(self, sock: socket.socket, *, takes_fds: bool = True) -> None:
        """``takes_fds`` False: the kernel closes descriptors that a peer sends, so that they can't fill the table."""
        sock.setblocking(False)
        self._sock = sock
        self._room_for_fds = socket.CMSG_SPACE(MAX_FDS * 4) if takes_fds else 0
        self._decoder = Decoder()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """Return the descriptor for ``select`` and ``poll``; -1 once closed."""
        return self._sock.fileno()

    def send(
        self, message: Message | Fact | Mapping[str, Any], fds: Sequence[int] = (), *, timeout_s: float = 1.0
    ) -> None:
        """Send one message, waiting at most ``timeout_s`` for room.

        Raises:
            ChannelClosedError: the peer is gone, or took nothing for that long (the channel is closed then, because
            half a message may be on its way).
        """
        data = memoryview(encode(message, len(fds)))
        deadline = time.monotonic() + timeout_s
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while data:
            try:
                sent = self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not wait_ready(self.fileno(), select.POLLOUT, deadline):
                    self.close()
                    raise ChannelClosedError("the peer takes no messages") from None
                continue
            except OSError as error:
                self.close()
                raise ChannelClosedError(f"the peer is gone ({error.strerror})") from None
            data, ancillary = data[sent:], []

    def receive(self, *, everything: bool = True) -> list[Received]:
        """Return all messages that are complete now.

        Without ``everything``, return those of one read: a peer that never pauses must not block the reader.

        Raises:
            ChannelClosedError: the peer is gone and everything it sent was returned before.
            ProtocolError: the peer doesn't speak this protocol; the channel is closed.
        """
        received: list[Received] = []
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(_CHUNK, self._room_for_fds, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return received
            except OSError:
                data, ancillary = b"", []
            self._keep_fds(ancillary)
            if not data:
                if received:
                    return received
                self.close()
                raise ChannelClosedError("the peer is gone")
            try:
                for message in map(decode, self._decoder.bodies(data)):
                    if message.fd_count > len(self._fds):
                        raise ProtocolError(f"message announces {message.fd_count} descriptors, {len(self._fds)} came")
                    received.append(Received(message, tuple(self._fds.popleft() for _ in range(message.fd_count))))
                if len(self._fds) > MAX_FDS:
                    raise ProtocolError(f"{len(self._fds)} descriptors came that no message announced")
            except ProtocolError:
                for item in received:
                    close_fds(item.fds)
                self.close()
                raise
            if received and not everything:
                return received

    def wait_message(self, timeout_s: float) -> Received:
        """Wait for the next message. Only for peers that send one message at a time.

        Raises:
            ChannelClosedError: the peer is gone.
            ProtocolError: the peer doesn't speak this protocol, or sent several messages.
            TimeoutError: no message came for ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            received = self.receive(everything=False)
            if len(received) > 1:
                for item in received:
                    close_fds(item.fds)
                self.close()
                raise ProtocolError(f"{len(received)} messages came, one was expected")
            if received:
                return received[0]
            # a peer that sends a byte now and then hasn't answered, either
            if not wait_ready(self.fileno(), select.POLLIN, deadline) or time.monotonic() >= deadline:
                raise TimeoutError(f"no answer for {timeout_s:g} s")

    def close(self) -> None:
        """Close the connection and descriptors that weren't taken. Idempotent."""
        close_fds(self._fds)
        self._fds.clear()
        self._sock.close()

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._fds.extend(numbers)


def close_fds(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors, ignoring closed ones."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def listen(path: str, backlog: int = 128) -> socket.socket:
    """Return a listening socket at ``path``, mode 0600, not inheritable. An existing socket is replaced.

    Raises:
        OSError: the path can't be used; anything but a socket at the path is left alone.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # on Linux the unbound socket's mode becomes the file's: at no moment is it wider
        os.fchmod(sock.fileno(), 0o600)
        with _short_path(path) as short:
            sock.bind(short)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def connect(path: str, timeout_s: float) -> Channel:
    """Connect to a listening socket of this user.

    Raises:
        OSError: no process listens there, or not within ``timeout_s`` seconds.
        ProtocolError: the listener belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        with _short_path(path) as short:
            sock.connect(short)
        check_peer(sock)
    except (OSError, ProtocolError):
        sock.close()
        raise
    return Channel(sock)


def accept_peer(listener: socket.socket) -> tuple[Channel, int, int] | None:
    """Accept a connection of the same user. Return its channel, and PID and pidfd of its process.

    None: it was closed in the meantime, or its process has ended, or is another user's.
    """
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    try:
        pid = check_peer(sock)
        return Channel(sock, takes_fds=False), pid, os.pidfd_open(pid)
    except (ProtocolError, OSError):
        sock.close()
        return None


def check_peer(sock: socket.socket) -> int:
    """Return the peer's PID, as the kernel knows it.

    Raises:
        ProtocolError: the peer runs as another user (root may connect to any).
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (0, os.geteuid()):
        raise ProtocolError(f"peer runs as user {uid}, expected {os.geteuid()}")
    return int(pid)


@contextlib.contextmanager
def _short_path(path: str) -> Iterator[str]:
    """Yield a name for ``path`` that fits the kernel's limit for socket addresses, whatever its length."""
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        yield path
        return
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
