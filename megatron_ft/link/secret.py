"""The job's secret, and the handshake by which both ends of a control connection prove it without sending it.

A leader with a secret first sends ``challenge``, and reads nothing but the answer, ``proof``. A launcher with one sends
``ask``, which only a leader without a secret answers, with ``open``: then the launcher stops. After ``proof`` and
``welcome`` every message travels in a sealed frame (`link.secure_channel`).

Messages of an unproven peer affect nothing but this connection. (One exception: a launcher that was never let in
anywhere takes ``open``, ``denied`` and another protocol version for its user's mistake.)
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


class Ask(Message, frozen=True):
    """From a launcher with a secret: prove that you know it."""


class Open(Message, frozen=True):
    """From a leader that has no secret, to ``Ask``."""


class Challenge(Message, frozen=True):
    """From a leader that has a secret, first of all: show that you know it."""

    nonce: _Nonce


class Proof(Message, frozen=True):
    """The launcher's answer to ``Challenge``: its proof, and ``nonce`` as its own challenge."""

    nonce: _Nonce
    mac: _Mac


class Welcome(Message, frozen=True):
    """The leader's answer to ``Proof``: its own proof."""

    mac: _Mac


class Denied(Message, frozen=True):
    """From a leader, to anything else: the other end doesn't know the secret."""


HandshakeMessage = Ask | Open | Challenge | Proof | Welcome | Denied
HANDSHAKE: Vocabulary[HandshakeMessage] = Vocabulary(HandshakeMessage)


class SecretError(ProtocolError):
    """Raised if the two ends don't have the same secret. The message says what a launcher's user can do."""


class Handshake:
    """One end's part: the leader (`Role.LISTENS`) or a launcher. Without a secret there is nothing to prove."""

    def __init__(self, secret: bytes | None, role: Role) -> None:
        self._secret, self._role = secret, role
        self._nonce = b"" if secret is None else new_nonce()
        self._offered: Session | None = None
        """A launcher's session before the leader has proved that it knows the secret."""
        self.channel: SecureChannel | None = None
        """Set once the other end has proved that it knows the secret."""

    @property
    def is_done(self) -> bool:
        return self._secret is None or self.channel is not None

    def first(self) -> Ask | Challenge | None:
        """Return the first message of a new connection."""
        if self._secret is None:
            return None
        return Ask() if self._role is Role.CONNECTS else Challenge(self._nonce.hex())

    def answer(self, raw: Raw) -> Proof | Welcome | None:
        """Return the answer to a message, while not ``is_done``.

        Raises:
            SecretError: the other end has another secret, or none.
            ProtocolError: the message is one that no leader sends here.
        """
        if self._role is Role.CONNECTS:
            return self._answer_leader(HANDSHAKE.parse(raw))
        try:
            return self._answer_launcher(HANDSHAKE.parse(raw))
        except ProtocolError as error:  # the hello of a launcher without a secret, say: it is told
            raise SecretError(str(error)) from None

    def _answer_launcher(self, message: HandshakeMessage) -> Welcome | None:
        assert self._secret is not None
        if isinstance(message, Ask):
            return None  # the challenge is on its way
        if not isinstance(message, Proof):
            raise ProtocolError("no proof of the job's secret (FT_SECRET)")
        session = Session(self._secret, _PURPOSE, connects=bytes.fromhex(message.nonce), listens=self._nonce)
        if not session.is_proof(bytes.fromhex(message.mac), Role.CONNECTS):
            raise ProtocolError("doesn't know the job's secret (FT_SECRET)")
        self.channel = session.channel(Role.LISTENS)
        return Welcome(session.proof(Role.LISTENS).hex())

    def _answer_leader(self, message: HandshakeMessage) -> Proof | None:
        assert self._secret is not None
        if isinstance(message, Open):
            raise SecretError("has no secret, and this launcher has one: set FT_SECRET on all nodes, or on none")
        if isinstance(message, Denied):
            raise SecretError("has another secret than this launcher: FT_SECRET has to be the same on all nodes")
        if isinstance(message, Challenge) and self._offered is None:
            theirs = bytes.fromhex(message.nonce)
            self._offered = Session(self._secret, _PURPOSE, connects=self._nonce, listens=theirs)
            return Proof(self._nonce.hex(), self._offered.proof(Role.CONNECTS).hex())
        if isinstance(message, Welcome) and self._offered is not None:
            # a leader with another secret would have denied the proof
            if not self._offered.is_proof(bytes.fromhex(message.mac), Role.LISTENS):
                raise FrameError("the coordinator's proof of the job's secret isn't authentic")
            self.channel = self._offered.channel(Role.CONNECTS)
            return None
        raise ProtocolError(f"sends {type(message).__name__} where it has to show that it knows the job's secret")


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
