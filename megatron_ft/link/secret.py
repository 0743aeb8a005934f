"""The job's secret, and the handshake by which both ends of a control connection prove it without sending it.

An end with a secret first sends ``challenge``. A launcher answers the leader's with ``proof``, and the leader answers
that with its own. From then on every message travels in a sealed frame (`link.secure_channel`). A leader with a secret
answers anything else with ``denied``, and so does one without a secret if it is challenged: then the launcher stops.

Messages of an unproven peer affect nothing but this connection. (One exception: a launcher that was never let in
anywhere takes ``denied`` and another protocol version for its user's mistake.)
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from megatron_ft.errors import ConfigError, ProtocolError
from megatron_ft.link.base.codec import Message, Raw, Vocabulary
from megatron_ft.link.secure_channel import FrameError, Role, SecureChannel, Session, new_nonce

HANDSHAKE_BYTES = 4096
"""Bytes that an end may send in all before its proof."""
_PURPOSE = "control"
_LEAST_BYTES, _MOST_BYTES = 16, 4096
_Nonce = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
_Mac = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Challenge(Message, frozen=True):
    """From an end that has a secret, first of all: show that you know it."""

    nonce: _Nonce


class Proof(Message, frozen=True):
    """From an end that was challenged: it knows the secret."""

    mac: _Mac


class Denied(Message, frozen=True):
    """From a leader: the other end doesn't know the secret. ``has_secret`` is False if there is none to know."""

    has_secret: bool = True


HandshakeMessage = Challenge | Proof | Denied
HANDSHAKE: Vocabulary[HandshakeMessage] = Vocabulary(HandshakeMessage)


class SecretError(ProtocolError):
    """Raised if the two ends don't have the same secret. The message says what a launcher's user can do."""


class Handshake:
    """One end's part: the leader (`Role.LISTENS`) or a launcher. Without a secret there is nothing to prove."""

    def __init__(self, secret: bytes | None, role: Role) -> None:
        self._secret, self._role, self._nonce = secret, role, new_nonce()
        self._session: Session | None = None
        """Set once the other end has sent its challenge."""
        self.channel: SecureChannel | None = None
        """Set once the other end has proved that it knows the secret."""

    def first(self) -> Challenge | None:
        """Return the first message of a new connection."""
        return None if self._secret is None else Challenge(self._nonce.hex())

    def answer(self, raw: Raw) -> Proof | None:
        """Return the answer to a message, while there is no ``channel``.

        Raises:
            SecretError: the other end has another secret, or none.
            FrameError: a leader's proof is wrong. One with another secret would have denied the launcher's.
            ProtocolError: the message is one that no leader sends here.
        """
        assert self._secret is not None
        is_launcher = self._role is Role.CONNECTS
        try:
            match HANDSHAKE.parse(raw):
                case Denied(has_secret) if is_launcher:
                    if not has_secret:
                        raise SecretError(
                            "has no secret, and this launcher has one: set FT_SECRET on all nodes, or none"
                        )
                    raise SecretError(
                        "has another secret than this launcher: FT_SECRET has to be the same on all nodes"
                    )
                case Challenge(nonce) if self._session is None:
                    nonces = (self._nonce, bytes.fromhex(nonce))
                    connects, listens = nonces if is_launcher else nonces[::-1]
                    self._session = Session(self._secret, _PURPOSE, connects=connects, listens=listens)
                    return Proof(self._session.proof(self._role).hex()) if is_launcher else None
                case Proof(mac) if self._session is not None:
                    if not self._session.is_proof(bytes.fromhex(mac), self._role.other):
                        raise FrameError("the coordinator's proof of the job's secret isn't authentic")
                    self.channel = self._session.channel(self._role)
                    return None if is_launcher else Proof(self._session.proof(self._role).hex())
                case message:
                    sent = type(message).__name__
                    raise ProtocolError(f"sends {sent} where it has to show that it knows the job's secret")
        except ProtocolError:
            if is_launcher:
                raise
            # the hello of a launcher without a secret, say: it is told
            raise SecretError("doesn't know the job's secret (FT_SECRET)") from None


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's secret from FT_SECRET or the file FT_SECRET_FILE; None if neither is set, or both are empty.

    Raises:
        ConfigError: the secret is empty, too short, too long, or has a NUL byte; or the file can't be read.
    """
    source, path = "FT_SECRET", environ.get("FT_SECRET_FILE")
    secret = os.fsencode(environ.get("FT_SECRET", ""))
    if not secret and not path:
        return None
    if not secret and path:
        source = f"FT_SECRET_FILE: {path}"
        try:
            with open(path, "rb") as file:
                secret = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{source} can't be read: {error.strerror}") from None
    secret = secret.strip()
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES or b"\0" in secret:
        # an empty file must not open the job to every user
        what = "a NUL byte" if b"\0" in secret else f"{len(secret)} bytes"
        raise ConfigError(f"{source} has {what}: {_LEAST_BYTES} to {_MOST_BYTES} random bytes are needed")
    return secret


def memory_pickle_key(secret: bytes | None) -> str:
    """Return the key for the MAC of what ranks pickle into memory checkpoints: the same for all lives with a secret."""
    key = os.urandom(32) if secret is None else hmac.digest(secret, b"megatron_ft 1\0memory pickle", "sha256")
    return key.hex()


def memory_copies_key(secret: bytes) -> str:
    """Return the key by which keepers prove to each other that they are of one job; nothing else follows from it."""
    return hmac.digest(secret, b"megatron_ft 1\0memory copies", "sha256").hex()
