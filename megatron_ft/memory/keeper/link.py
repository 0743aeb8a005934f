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
from megatron_ft.link.secure_channel import (
    NONCE_BYTES,
    SEAL_BYTES,
    FrameError,
    Role,
    Session,
    new_nonce,
)
from megatron_ft.link.wire import LENGTH_BYTES, decode, encode
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.keeper_messages import BETWEEN_KEEPERS, PIECE_BYTES, BetweenKeepers

STALL_S = 10.0
"""Seconds in which something must come, or be taken; and in which the other end must have proved who it is."""
_PURPOSE = "memory copies"
_PROOF_BYTES = 32
FAILURES = (OSError, ProtocolError, SnapshotError)


class Link:
    """A connection, once both ends have proved that they are keepers of the job. If that fails, it is closed."""

    def __init__(self, sock: socket.socket, key: bytes, role: Role) -> None:
        self._sock = sock
        until_s, mine = time.monotonic() + STALL_S, new_nonce()
        try:
            sock.settimeout(STALL_S)
            sock.sendall(mine)
            theirs = _exactly(sock, NONCE_BYTES, until_s)
            connects, listens = (mine, theirs) if role is Role.CONNECTS else (theirs, mine)
            session = Session(key, _PURPOSE, connects=connects, listens=listens)
            if role is Role.CONNECTS:  # shows first that it knows the key
                sock.sendall(session.proof(role))
            if not session.is_proof(_exactly(sock, _PROOF_BYTES, until_s), role.other):
                raise FrameError("the other end is no keeper of this job")
            if role is Role.LISTENS:
                sock.sendall(session.proof(role))
        except BaseException:
            sock.close()
            raise
        self._channel = session.channel(role)

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
        until_s = time.monotonic() + timeout_s
        length = int.from_bytes(_exactly(self._sock, LENGTH_BYTES, until_s), "big")
        if not SEAL_BYTES <= length <= PIECE_BYTES + SEAL_BYTES:
            raise ProtocolError(f"a frame of {length} bytes came")
        return self._channel.open(_exactly(self._sock, length, until_s))


def connect(address: str, key: bytes) -> Link:
    """Connect to the keeper at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    return Link(socket.create_connection((host.strip("[]"), int(port)), timeout=STALL_S), key, Role.CONNECTS)


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
