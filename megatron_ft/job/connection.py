"""One end of a connection between a launcher and the leader, on an event loop.

Its frames are sealed once both ends have proved the secret. It never blocks, and calls its owner from the loop only.
Bytes that the other end doesn't take at once are kept, up to a limit; a slower one is given up.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_ft.errors import ProtocolError
from megatron_ft.link.linux.processes import wait_ready
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secure_channel import HANDSHAKE_BYTES, SEAL_BYTES, Handshake, SecureChannel
from megatron_ft.link.wire import LENGTH_BYTES, MAX_MESSAGE_BYTES, Decoder, decode, encode

_T = TypeVar("_T")
_CHUNK = 1 << 16
_MOST_UNSENT = 8 << 20
_RESET = struct.pack("ii", 1, 0)


class Connection(Generic[_T]):
    """One end of a connection. At most one frame and one read of the other end's bytes are kept.

    Args:
        connects: this end has made the connection.
        parse: returns the message in the body of a frame.
        heard: gets each message. It and ``parse`` raise `ProtocolError` if the other end has to be given up.
        ended: is called when no message will come any more, before the connection is closed. None: the other end has
            closed it; else a `ProtocolError` says what was wrong with that, or an `OSError` what with the way to it.
        proven: is called once both ends have proved the secret.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        *,
        secret: bytes | None,
        connects: bool,
        parse: Callable[[bytes], _T],
        heard: Callable[[_T], object],
        ended: Callable[[OSError | ProtocolError | None], object],
        proven: Callable[[], object] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self.sock, self._reactor = sock, reactor
        self._parse, self._proven, self._heard, self._ended = parse, proven, heard, ended
        self.channel: SecureChannel | None = None
        """Set once the other end has proved that it knows the secret."""
        self._is_closed = self._waits_for_room = False
        self._problem: OSError | None = None
        """Why nothing can be sent any more."""
        self._unsent = bytearray()
        self._decoder = Decoder(HANDSHAKE_BYTES)
        self._handshake = Handshake(secret, connects=connects)
        reactor.watch(sock.fileno(), self._served)
        self._send_unsealed(encode(self._handshake.first()))

    def send(self, frame: bytes) -> None:
        """Send a frame of `link.wire.encode`, or as much of it as there is room for now."""
        self.queue(frame[LENGTH_BYTES:])
        self.flush()

    def queue(self, body: bytes) -> None:
        """Have the body of a frame sent by the next ``flush``; nothing is sent before the proof."""
        if (channel := self.channel) is None:
            return
        self._unsent += channel.seal(body)
        self._unsent += body
        if len(self._unsent) > _MOST_UNSENT:
            self._fail(OSError("it takes nothing"))

    def flush(self) -> None:
        if self._is_closed or not self._unsent:
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
        with self.sock, contextlib.suppress(OSError):
            if resets:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            until_s = time.monotonic() + within_s
            while self._unsent:
                wait_ready(self.sock.fileno(), select.POLLOUT, until_s)
                del self._unsent[: self.sock.send(self._unsent)]
            if within_s:
                self.sock.shutdown(socket.SHUT_WR)
                while self.sock.recv(_CHUNK):
                    pass  # to close with something unread would drop what the other end hasn't got yet

    def _served(self) -> None:
        """The socket can be read, or has room."""
        if self._waits_for_room:
            self.flush()
        data = b""
        problem: OSError | ProtocolError | None = self._problem
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            problem = problem or error  # an error is reported once; a later one says less
        try:
            for body in self._decoder.bodies(data):
                if (channel := self.channel) is not None:
                    self._heard(self._parse(channel.open(body)))
                else:
                    self._shake_hands(body)
                if self._is_closed:
                    return
            if data:
                return
        except ProtocolError as error:
            problem = error
        self._ended(problem)
        self.close()

    def _shake_hands(self, body: bytes) -> None:
        if (proof := self._handshake.answer(decode(body))) is not None:
            self._send_unsealed(encode(proof))
        if (channel := self._handshake.channel) is not None:
            self.channel, self._decoder.max_bytes = channel, MAX_MESSAGE_BYTES + SEAL_BYTES
            self._proven()

    def _send_unsealed(self, frame: bytes) -> None:
        self._unsent += frame
        self.flush()

    def _fail(self, problem: OSError) -> None:
        """Send nothing any more. What has come is still read, and then the owner hears of the end."""
        self._problem = self._problem or problem
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
