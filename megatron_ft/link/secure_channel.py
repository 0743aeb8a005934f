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

from megatron_ft.errors import ProtocolError

NONCE_BYTES = 16
_MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
SEAL_BYTES = _COUNTER.size + _MAC_BYTES
"""Bytes that a seal adds to a frame."""


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

    def channel(self, role: Role) -> SecureChannel:
        """Return the channel of the end with that role, for everything that follows the proofs."""
        return SecureChannel(self._derive("frames", role), self._derive("frames", role.other))

    def _derive(self, use: str, role: Role) -> bytes:
        # HKDF's only round: the label tells one derived value from another
        label = f"megatron_ft 1\0{self._purpose}\0{use}\0{role.value}\x01".encode()
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
        """``sends``, ``receives``: keys of 32 bytes, as `Session.channel` derives them."""
        # keyed once: copying the state is cheaper than keying it for each frame
        self._seals = hashlib.blake2b(key=sends, digest_size=_MAC_BYTES)
        self._opens = hashlib.blake2b(key=receives, digest_size=_MAC_BYTES)
        self._sealed = self._opened = 0

    def seal(self, message: bytes | memoryview) -> bytes:
        """Return the bytes that precede ``message`` on the wire, which is sent unchanged: one serves many links."""
        counter = _COUNTER.pack(self._sealed)
        self._sealed += 1
        return _LENGTH.pack(SEAL_BYTES + len(message)) + counter + _mac(self._seals, counter, message)

    def open(self, body: bytes) -> bytes:
        """Return the message in the body of a frame.

        Raises:
            FrameError: the other end didn't send that in this place; the connection must be closed.
        """
        counter, message = body[: _COUNTER.size], body[SEAL_BYTES:]
        if not hmac.compare_digest(body[_COUNTER.size : SEAL_BYTES], _mac(self._opens, counter, message)):
            why = "it was changed on its way, or its sender doesn't know the secret"
            raise FrameError(f"frame {self._opened} isn't authentic: {why}")
        (number,) = _COUNTER.unpack(counter)
        if number != self._opened:
            what = "was sent twice or late" if number < self._opened else "came too early, others are missing"
            raise FrameError(f"frame {number} {what}: frame {self._opened} was expected")
        self._opened += 1
        return message


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def _mac(keyed: hashlib.blake2b, counter: bytes, message: bytes | memoryview) -> bytes:
    state = keyed.copy()
    state.update(counter)
    state.update(message)
    return state.digest()
