"""Handshake by which both ends of a control connection prove the job's secret without sending it.

A coordinator with a secret first sends ``challenge``, and reads nothing but the answer, ``proof``. A launcher with one
sends ``ask``, which only a coordinator without a secret answers, with ``open``: then the launcher stops. After
``proof`` and ``welcome`` every message travels in a sealed frame (`ipc.net.secure_channel`).

Messages of an unproven peer affect nothing but this connection. (One exception: a launcher that was never let in
anywhere takes ``open``, ``denied`` and another protocol version for its user's mistake.)
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from megatron_ft.core.errors import ConfigError, ProtocolError
from megatron_ft.core.messages.secret_messages import Ask, Challenge, Denied, Handshake, Open, Proof, Welcome
from megatron_ft.ipc.net.secure_channel import FrameError, Role, Session, new_nonce

HANDSHAKE_BYTES = 4096
"""Bytes that an end may send in all before its proof."""
_PURPOSE = "control"
_LEAST_BYTES, _MOST_BYTES = 16, 4096


class SecretError(ProtocolError):
    """Raised if the two ends don't have the same secret. The message says what a launcher's user can do."""


class CoordinatorHandshake:
    """The coordinator's end, which asks first. ``secret`` None: the job has none, and every launcher is let in."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = b"" if secret is None else new_nonce()
        self.is_done = secret is None
        self.session: Session | None = None
        """Set once the launcher has proved that it knows the secret."""

    def first(self) -> Challenge | None:
        """Return the first message of a new connection."""
        return None if self._secret is None else Challenge(self._nonce.hex())

    def answer(self, message: Handshake) -> Welcome | None:
        """Return the answer to a message, while not ``is_done``; afterwards the other end is let in.

        Raises:
            SecretError: the launcher doesn't know the secret; answer with `Denied`.
        """
        assert self._secret is not None
        if isinstance(message, Ask):
            return None  # the challenge is on its way
        if not isinstance(message, Proof):
            raise SecretError("no proof of the job's secret (FT_SECRET)")
        session = Session(self._secret, _PURPOSE, connects=bytes.fromhex(message.nonce), listens=self._nonce)
        if not session.is_proof(bytes.fromhex(message.mac), Role.CONNECTS):
            raise SecretError("doesn't know the job's secret (FT_SECRET)")
        self.session, self.is_done = session, True
        return Welcome(session.proof(Role.LISTENS).hex())


class LauncherHandshake:
    """The launcher's end."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = b"" if secret is None else new_nonce()
        self._offered: Session | None = None
        """Session before the coordinator has proved that it knows the secret."""
        self.is_done = secret is None
        self.session: Session | None = None
        """Set once the coordinator has proved that it knows the secret."""

    def first(self) -> Ask | None:
        """Return the first message of a new connection."""
        return None if self._secret is None else Ask()

    def answer(self, message: Handshake) -> Proof | None:
        """Return the answer to a message, while not ``is_done``, and to any ``challenge``.

        Raises:
            SecretError: the coordinator has another secret, none, or one where this launcher has none.
            ProtocolError: the message is one that no coordinator sends here.
        """
        if self._secret is None:
            raise SecretError("asks for the job's secret: set FT_SECRET (or FT_SECRET_FILE) as on the other nodes")
        if isinstance(message, Open):
            raise SecretError("has no secret, and this launcher has one: set FT_SECRET on all nodes, or on none")
        if isinstance(message, Denied):
            raise SecretError("has another secret than this launcher: FT_SECRET has to be the same on all nodes")
        if isinstance(message, Challenge) and self._offered is None:
            theirs = bytes.fromhex(message.nonce)
            self._offered = Session(self._secret, _PURPOSE, connects=self._nonce, listens=theirs)
            return Proof(self._nonce.hex(), self._offered.proof(Role.CONNECTS).hex())
        if isinstance(message, Welcome) and self._offered is not None:
            # a coordinator with another secret would have denied the proof
            if not self._offered.is_proof(bytes.fromhex(message.mac), Role.LISTENS):
                raise FrameError("the coordinator's proof of the job's secret isn't authentic")
            self.session, self.is_done = self._offered, True
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
