"""One end of a connection between a launcher and the leader, on an event loop.

Its frames are sealed once both ends have proved the secret. It never blocks, and calls its owner from the loop only.
Bytes that the other end doesn't take at once are kept, up to a limit; a slower one is given up.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Vocabulary, name_of
from megatron_ft.link.linux.processes import wait_ready
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secret import HANDSHAKE_BYTES, Challenge, Handshake, SecretError
from megatron_ft.link.secure_channel import SEAL_BYTES, FrameError, Role
from megatron_ft.link.wire import LENGTH_BYTES, MAX_MESSAGE_BYTES, Decoder, decode, encode

_T = TypeVar("_T")
_CHUNK = 1 << 16
_MOST_UNSENT = 8 << 20
_RESET = struct.pack("ii", 1, 0)
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Errors of a host that answers no packet; the last two if the network has reported it as unreachable meanwhile."""


def parse(vocabulary: Vocabulary[_T], body: bytes) -> _T:
    """Return the message in the body of a frame, at an end that has nothing to prove, or has proved it.

    Raises:
        SecretError: the other end has a secret, and this one has none.
        ProtocolError: it is none of these messages.
    """
    raw = decode(body)
    if raw.name == name_of(Challenge):
        raise SecretError("asks for the job's secret: set FT_SECRET (or FT_SECRET_FILE) as on the other nodes")
    return vocabulary.parse(raw)


class Connection(Generic[_T]):
    """One end of a connection. At most one frame and one read of the other end's bytes are kept.

    Args:
        parse: returns the message in the body of a frame, or raises `ProtocolError`.
        proven: is called once both ends have proved the secret; never where there is none.
        heard: gets each message.
        ended: is called when no message will come any more, before the connection is closed, with what was wrong with
            the other end, if it is that.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        *,
        secret: bytes | None,
        role: Role,
        parse: Callable[[bytes], _T],
        heard: Callable[[_T], object],
        ended: Callable[[ProtocolError | None], object],
        proven: Callable[[], object] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self.sock, self._reactor = sock, reactor
        self._parse, self._proven, self._heard, self._ended = parse, proven, heard, ended
        self.is_silent = False
        """The connection ended because its host answers no packet."""
        self.is_reset = False
        """The connection was reset on the way, or the other end is too slow: that hasn't closed it."""
        self._is_over = self._is_closed = self._has_failed = False
        """No further message is read; the owner hears nothing any more; no further byte is sent."""
        self._waits_for_room = False
        self._problem: ProtocolError | None = None
        self._unsent = bytearray()
        self._decoder = Decoder(MAX_MESSAGE_BYTES + SEAL_BYTES)
        self._handshake = Handshake(secret, role)
        self._allowance = HANDSHAKE_BYTES
        """Bytes that the other end may still send before its proof."""
        self.is_proven = secret is None
        reactor.watch(sock.fileno(), self._served)
        if (first := self._handshake.first()) is not None:
            self.send(encode(first))

    def send(self, frame: bytes) -> None:
        """Send a frame of `link.wire.encode`, or as much of it as there is room for now."""
        self.queue(frame)
        self.flush()

    def queue(self, frame: bytes) -> None:
        """Have a frame sent by the next ``flush``."""
        if self._has_failed:
            return  # the last frame that was sent may have been cut
        if (channel := self._handshake.channel) is not None:
            body = memoryview(frame)[LENGTH_BYTES:]
            frame = channel.seal(body) + body
        self._unsent += frame
        if len(self._unsent) > _MOST_UNSENT:
            self._fail()

    def close(self, *, resets: bool = False, within_s: float = 0.0) -> None:
        """Close it; the owner hears nothing any more.

        Args:
            resets: the other end isn't to take this process for one that has exited.
            within_s: seconds that unsent bytes have to go.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._reactor.unwatch(self.sock.fileno())
        with self.sock:
            until_s = time.monotonic() + within_s
            with contextlib.suppress(OSError):
                while self._unsent:
                    wait_ready(self.sock.fileno(), select.POLLOUT, until_s)
                    del self._unsent[: self.sock.send(self._unsent)]
                if within_s:
                    self.sock.shutdown(socket.SHUT_WR)
                    while self.sock.recv(_CHUNK):
                        pass  # to close with something unread would drop what the other end hasn't got yet
            if resets:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _served(self) -> None:
        """The socket can be read, or has room."""
        if self._waits_for_room:
            self.flush()
        for body in self._bodies():
            was_proven, message = self.is_proven, None
            try:
                if was_proven:
                    message = self._parse(body)
                else:
                    if (proof := self._handshake.answer(decode(body))) is not None:
                        self._unsent += encode(proof)  # without a seal, although this end may have a channel now
                        self.flush()
                    self.is_proven = self._handshake.channel is not None
            except ProtocolError as error:
                self._problem, self._is_over = error, True
                break
            if message is not None:  # an error that the owner raises isn't the other end's
                self._heard(message)
            elif self.is_proven:
                self._proven()
            if self._is_closed:
                return
        if self._is_over:
            self._end()

    def _bodies(self) -> Iterator[bytes]:
        """Yield the bodies of the frames that are complete now. A seal or an end that is wrong is a problem."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        channel = self._handshake.channel
        self._is_over |= not data
        try:
            if not data and channel is not None and self._decoder.buffered_bytes:
                raise FrameError("the connection ended within a frame")
            if not self.is_proven:
                self._allowance -= len(data)
                if self._allowance < 0:
                    raise ProtocolError("too many bytes before the proof of the secret")
            for body in self._decoder.bodies(data):
                channel = self._handshake.channel
                yield body if channel is None else channel.open(body)
        except ProtocolError as error:
            is_sealed = channel is not None and not isinstance(error, FrameError)
            self._problem, self._is_over = FrameError(str(error)) if is_sealed else error, True

    def flush(self) -> None:
        if self._is_closed or self._has_failed or not self._unsent:
            return
        try:
            del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass  # the loop reports when there is room again
        except OSError as error:
            self._fail(error)
        waits = bool(self._unsent)
        if waits is not self._waits_for_room:
            self._waits_for_room = waits
            self._reactor.watch_room(self.sock.fileno(), waits)

    def _fail(self, error: OSError | None = None) -> None:
        """The connection has ended by an error, or is given up: the owner hears that from the loop."""
        self._unsent.clear()
        self._has_failed = True
        self.is_silent |= error is not None and error.errno in _SILENCE  # reported once; a later error says less
        self.is_reset |= error is None or error.errno == errno.ECONNRESET
        if not self._is_over:
            self._is_over = True
            self._reactor.call_later(0.0, self._end)

    def _end(self) -> None:
        if not self._is_closed:
            self._ended(self._problem)
            self.close()
