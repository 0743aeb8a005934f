"""Authenticated connections: a handshake, then a counter and a MAC in every frame. No I/O.

1. Each end first sends a `Challenge`, a fresh random nonce. All keys follow from the secret and both nonces.
2. Each end answers with a `Proof`. It binds both nonces and the role of its sender, so that it is invalid on another
  connection, or sent back to its sender.
3. Everything after the proofs travels in the frames of a `SecureChannel`, each under the key of its direction.

A process between the two ends that doesn't know the secret can forward bytes or stop; it can't make a frame. Nothing is
encrypted. An end that has no secret does the same with an empty one, which any process knows.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Annotated

from msgspec import Meta

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Message, Raw, Vocabulary
from megatron_ft.link.wire import LENGTH_BYTES, encode

HANDSHAKE_BYTES = 2048
"""Most bytes of a message before the proofs."""
_MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
SEAL_BYTES = _COUNTER.size + _MAC_BYTES
"""Bytes that a seal adds to a frame."""


class SecretError(ProtocolError):
    """Raised if the two ends don't have the same secret."""


class Challenge(Message, frozen=True):
    """The first message of both ends: show that you know the secret."""

    nonce: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Proof(Message, frozen=True):
    """The answer: this end knows the secret."""

    mac: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


HANDSHAKE: Vocabulary[Challenge | Proof] = Vocabulary(Challenge | Proof)


class Handshake:
    """One end's part. Keys are derived by HKDF-SHA256 (RFC 5869). ``connects``: this end has made the connection."""

    __slots__ = ("_connects", "_key", "_nonce", "_secret", "channel")

    def __init__(self, secret: bytes | None, *, connects: bool) -> None:
        self._secret, self._connects, self._nonce = secret or b"", connects, os.urandom(16)
        self._key = b""
        self.channel: SecureChannel | None = None
        """Set once the other end has proved that it knows the secret."""

    def first(self) -> Challenge:
        """Return the first message of a new connection."""
        return Challenge(self._nonce.hex())

    def answer(self, raw: Raw) -> Proof | None:
        """Return the answer to a message, while there is no ``channel``.

        Raises:
            SecretError: the other end has another secret.
            ProtocolError: the message is none of a handshake, or comes in a wrong place.
        """
        message = HANDSHAKE.parse(raw)
        if encode(message)[LENGTH_BYTES:] != raw.body:
            raise ProtocolError("sends a message that was changed on its way")
        match message:
            case Challenge(nonce) if not self._key and nonce != self._nonce.hex():  # else it is an echo
                theirs = bytes.fromhex(nonce)
                nonces = self._nonce + theirs if self._connects else theirs + self._nonce
                self._key = hmac.digest(nonces, self._secret, "sha256")
                return Proof(self._derive("proof", self._connects).hex())
            case Proof(mac) if self._key:
                if not hmac.compare_digest(bytes.fromhex(mac), self._derive("proof", not self._connects)):
                    raise SecretError("has another secret: FT_SECRET (or FT_SECRET_FILE) must be the same on all nodes")
                keys = [self._derive("frames", connects) for connects in (self._connects, not self._connects)]
                self.channel = SecureChannel(*keys)
                return None
            case _:
                raise ProtocolError(f"sends {type(message).__name__} in a wrong place")

    def _derive(self, use: str, connects: bool) -> bytes:
        # HKDF's only round: the label tells one derived value from another
        label = f"megatron_ft 2\0{use}\0{'connects' if connects else 'listens'}\x01".encode()
        return hmac.digest(self._key, label, "sha256")


class SecureChannel:
    """Seals the frames of one direction and opens those of the other.

    The body of a frame is a counter from 0 (8 bytes), a MAC (16 bytes) and the message. The MAC is keyed BLAKE2b over
    counter and message, under the key of the direction. It authenticates:

    * the message, and with it the frame's length: bytes that were changed, added or left out fail;
    * the place in the stream: a frame that is missing, repeated or in another order has the wrong counter;
    * the sender and the connection: a frame of another connection, or one sent back, is under another key.

    The end of the stream isn't authenticated: a process on the way can cut the connection between two frames. After a
    wrong frame nothing more may be read: the owner closes the connection.
    """

    __slots__ = ("_opened", "_opens", "_sealed", "_seals")

    def __init__(self, sends: bytes, receives: bytes) -> None:
        """``sends``, ``receives``: keys of 32 bytes."""
        # keyed once: copying the state is cheaper than keying it for each frame
        self._seals = hashlib.blake2b(key=sends, digest_size=_MAC_BYTES)
        self._opens = hashlib.blake2b(key=receives, digest_size=_MAC_BYTES)
        self._sealed = self._opened = 0

    def seal(self, message: bytes) -> bytes:
        """Return the bytes that precede ``message`` on the wire, which is sent unchanged: one serves many links."""
        seal = _seal(self._seals, self._sealed, message)
        self._sealed += 1
        return _LENGTH.pack(SEAL_BYTES + len(message)) + seal

    def open(self, body: bytes) -> bytes:
        """Return the message in the body of a frame.

        Raises:
            ProtocolError: the other end didn't send that in this place; the connection must be closed.
        """
        seal, message = body[:SEAL_BYTES], body[SEAL_BYTES:]
        if hmac.compare_digest(seal, _seal(self._opens, self._opened, message)):
            self._opened += 1
            return message
        number = int.from_bytes(seal[: _COUNTER.size], "big")
        if not hmac.compare_digest(seal, _seal(self._opens, number, message)):
            why = "it was changed on its way, or its sender doesn't know the secret"
            raise ProtocolError(f"frame {self._opened} isn't authentic: {why}")
        what = "was sent twice or late" if number < self._opened else "came too early, others are missing"
        raise ProtocolError(f"frame {number} {what}: frame {self._opened} was expected")


def _seal(keyed: hashlib.blake2b, number: int, message: bytes) -> bytes:
    counter, state = _COUNTER.pack(number), keyed.copy()
    state.update(counter + message)
    return counter + state.digest()
