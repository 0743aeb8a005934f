"""One authenticated connection between the keepers of two nodes, used by one thread that may wait.

All raise OSError if the connection has ended or the other end is silent, ProtocolError if that isn't a keeper of the
job, and SnapshotError if it refuses (`FAILURES`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from megatron_ft.errors import ProtocolError, SnapshotError
from megatron_ft.link.secure_channel import HANDSHAKE_BYTES, SEAL_BYTES, Handshake
from megatron_ft.link.wire import LENGTH_BYTES, decode, encode
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.keeper_messages import BETWEEN_KEEPERS, PIECE_BYTES, BetweenKeepers

STALL_S = 10.0
"""Seconds in which something must come, or be taken; and in which the other end must have proved who it is."""
FAILURES = (OSError, ProtocolError, SnapshotError)


class Link:
    """A connection, once both ends have proved that they are keepers of the job. If that fails, it is closed."""

    def __init__(self, sock: socket.socket, key: bytes, *, connects: bool) -> None:
        self._sock = sock
        handshake, until_s = Handshake(key, connects=connects), time.monotonic() + STALL_S
        try:
            sock.settimeout(STALL_S)
            sock.sendall(encode(handshake.first()))
            while handshake.channel is None:
                if (proof := handshake.answer(decode(self._frame(HANDSHAKE_BYTES, until_s)))) is not None:
                    sock.sendall(encode(proof))
        except BaseException:
            sock.close()
            raise
        self._channel = handshake.channel

    def close(self) -> None:
        self._sock.close()

    def send(self, message: BetweenKeepers) -> None:
        self._send(encode(message)[LENGTH_BYTES:])

    def receive(self, timeout_s: float = STALL_S) -> BetweenKeepers:
        """Return the next message."""
        return BETWEEN_KEEPERS.parse(decode(self._receive(timeout_s)))

    def send_segment(self, fd: int, nbytes: int, bytes_per_s: int, on_piece: Callable[[], None]) -> None:
        """Send the content of a segment, no faster than allowed. ``on_piece`` may raise."""
        began_s = time.monotonic()
        for offset in range(0, nbytes, PIECE_BYTES):
            on_piece()
            piece = os.pread(fd, min(PIECE_BYTES, nbytes - offset), offset)
            self._send(piece)
            ahead_s = (offset + len(piece)) / bytes_per_s - (time.monotonic() - began_s) if bytes_per_s else 0.0
            if ahead_s > 0:
                time.sleep(ahead_s)

    def receive_segment(self, nbytes: int, make_room: Callable[[int], None]) -> int:
        """Return the descriptor of a sealed segment with what comes. ``make_room`` may raise."""

        def fill(fd: int) -> None:
            for offset in range(0, nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, nbytes - offset)
                make_room(count)
                piece = self._receive()
                if len(piece) != count:
                    raise ProtocolError(f"a piece of {len(piece)} bytes came, not {count}")
                segment.write(fd, memoryview(piece), offset)

        return segment.filled(nbytes, fill)

    def _send(self, body: bytes) -> None:
        self._sock.sendall(self._channel.seal(body))
        self._sock.sendall(body)

    def _receive(self, timeout_s: float = STALL_S) -> bytes:
        return self._channel.open(self._frame(PIECE_BYTES + SEAL_BYTES, time.monotonic() + timeout_s))

    def _frame(self, most: int, until_s: float) -> bytes:
        length = int.from_bytes(_exactly(self._sock, LENGTH_BYTES, until_s), "big")
        if length > most:
            raise ProtocolError(f"a frame of {length} bytes came")
        return _exactly(self._sock, length, until_s)


def connect(address: str, key: bytes) -> Link:
    """Connect to the keeper at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    return Link(socket.create_connection((host.strip("[]"), int(port)), timeout=STALL_S), key, connects=True)


def _exactly(sock: socket.socket, count: int, until_s: float) -> bytes:
    found, at = bytearray(count), 0
    while at < count:
        sock.settimeout(max(0.001, until_s - time.monotonic()))
        more = sock.recv_into(memoryview(found)[at:])
        if not more:
            raise ConnectionResetError("the connection has ended")
        at += more
    sock.settimeout(STALL_S)
    return bytes(found)
