"""Authenticated frames for one connection: keys from a shared secret, a counter and a MAC in every frame. No I/O.

Proofs, in order:

1. Each end sends a fresh random nonce. `Session` derives everything below from the secret, both nonces and a purpose.
2. Each end sends its proof. A proof binds both nonces, the purpose and the role of its sender, so that it is invalid
  on another connection, in another protocol, or sent back to its sender.
3. Everything after the proofs travels in the frames of a `SecureChannel`, each under the key of its direction.

A process between the two ends that doesn't know the secret can forward bytes or stop; it can't make a frame. Nothing is
encrypted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Iterable, Iterator

from megatron_ft.core.errors import ProtocolError

NONCE_BYTES = 16
_MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
SEAL_BYTES = _COUNTER.size + _MAC_BYTES
"""Bytes that a seal adds to a frame."""
_BODY_AT = _LENGTH.size + SEAL_BYTES


class FrameError(ProtocolError):
    """Raised for a frame that the other end didn't send in this place. The message says what is wrong."""


class Role(enum.Enum):
    CONNECTS = "connects"
    LISTENS = "listens"

    @property
    def other(self) -> Role:
        return Role.LISTENS if self is Role.CONNECTS else Role.CONNECTS


class Session:
    """Proofs and keys of one connection, derived from the secret and both nonces by HKDF-SHA256 (RFC 5869).

    Args:
        purpose: name of the protocol. The same secret and nonces give other proofs and keys under another purpose.
        connects, listens: nonces of the two ends, fresh on each connection, `NONCE_BYTES` each.
    """

    __slots__ = ("_key", "_purpose")

    def __init__(self, secret: bytes, purpose: str, *, connects: bytes, listens: bytes) -> None:
        if not len(connects) == len(listens) == NONCE_BYTES:
            raise ProtocolError("nonce of a wrong length")
        self._key = hmac.digest(connects + listens, secret, "sha256")
        self._purpose = purpose

    def proof(self, role: Role) -> bytes:
        """Return what the end with that role sends to show that it knows the secret."""
        return self._derive("proof", role)

    def is_proof(self, proof: bytes, role: Role) -> bool:
        """Return True if the end with that role knows the secret. Takes the same time for every wrong proof."""
        return hmac.compare_digest(proof, self.proof(role))

    def channel(self, role: Role, max_body_bytes: int) -> SecureChannel:
        """Return the channel of the end with that role, for everything that follows the proofs."""
        sends, receives = self._derive("frames", role), self._derive("frames", role.other)
        return SecureChannel(sends, receives, max_body_bytes)

    def _derive(self, use: str, role: Role) -> bytes:
        # HKDF's only round: the label tells one derived value from another
        label = f"megatron_ft 1\0{self._purpose}\0{use}\0{role.value}\x01".encode()
        return hmac.digest(self._key, label, "sha256")


class SecureChannel:
    """Seals the frames of one direction and opens those of the other.

    A frame is the length of the rest (4 bytes), a counter from 0 (8 bytes), a MAC (16 bytes) and the body. The MAC is
    keyed BLAKE2b over counter and body, under the key of the direction. It authenticates:

    * the body, and with it the length: bytes that were changed, added or left out fail;
    * the place in the stream: a frame that is missing, repeated or in another order has the wrong counter;
    * the sender and the connection: a frame of another connection, or one sent back, is under another key.

    The end of the stream isn't authenticated: a process on the way can cut the connection between two frames. A length
    is believed before its MAC is seen, but no more than ``max_body_bytes`` are ever kept for it.

    After the first wrong frame nothing more is read: ``feed`` raises the same error again.
    """

    __slots__ = ("_buffer", "_error", "_max_bytes", "_opened", "_opens", "_sealed", "_seals")

    def __init__(self, sends: bytes, receives: bytes, max_body_bytes: int) -> None:
        """``sends``, ``receives``: keys of 32 bytes, as `Session.channel` derives them."""
        # keyed once: copying the state is cheaper than keying it for each frame
        self._seals = hashlib.blake2b(key=sends, digest_size=_MAC_BYTES)
        self._opens = hashlib.blake2b(key=receives, digest_size=_MAC_BYTES)
        self._sealed = self._opened = 0
        self._max_bytes = max_body_bytes + SEAL_BYTES
        self._buffer = bytearray()
        self._error: FrameError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._buffer)

    def seal(self, body: bytes | memoryview) -> bytes:
        """Return the bytes that precede ``body`` on the wire. The body is sent unchanged, so one body serves many
        links."""
        counter = _COUNTER.pack(self._sealed)
        self._sealed += 1
        return _LENGTH.pack(SEAL_BYTES + len(body)) + counter + _mac(self._seals, counter, body)

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Return the bodies of the frames that are whole now, each authentic. Read them all before the next call.

        Raises:
            FrameError: the next frame isn't what the other end sent next; the connection must be closed.
        """
        if self._error is not None:
            raise self._error
        size = len(data)
        if not self._buffer and _BODY_AT <= size <= _LENGTH.size + self._max_bytes:
            if data[: _LENGTH.size] == _LENGTH.pack(size - _LENGTH.size):  # one frame, and no more: nearly always
                body = data[_BODY_AT:]
                self._check(data[_LENGTH.size : _BODY_AT], body)
                return (body,)
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if not SEAL_BYTES <= length <= self._max_bytes:
                self._fail(f"a frame of {length} bytes, {SEAL_BYTES} to {self._max_bytes} are allowed")
            end = _LENGTH.size + length
            if len(buffer) < end:
                return
            seal = bytes(buffer[_LENGTH.size : _BODY_AT])
            body = bytes(memoryview(buffer)[_BODY_AT:end])
            del buffer[:end]
            self._check(seal, body)
            yield body

    def end(self) -> None:
        """Check that the stream has ended between two frames.

        Raises:
            FrameError: it ended within one.
        """
        if self._buffer and self._error is None:
            self._fail(f"the connection ended within frame {self._opened}")

    def _check(self, seal: bytes, body: bytes) -> None:
        counter = seal[: _COUNTER.size]
        if not hmac.compare_digest(seal[_COUNTER.size :], _mac(self._opens, counter, body)):
            why = "it was changed on its way, or its sender doesn't know the secret"
            self._fail(f"frame {self._opened} isn't authentic: {why}")
        (number,) = _COUNTER.unpack(counter)
        if number != self._opened:
            what = "was sent twice or late" if number < self._opened else "came too early, others are missing"
            self._fail(f"frame {number} {what}: frame {self._opened} was expected")
        self._opened += 1

    def _fail(self, text: str) -> None:
        self._buffer = bytearray()
        self._error = FrameError(text)
        raise self._error


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def _mac(keyed: hashlib.blake2b, counter: bytes, body: bytes | memoryview) -> bytes:
    state = keyed.copy()
    state.update(counter)
    state.update(body)
    return state.digest()
