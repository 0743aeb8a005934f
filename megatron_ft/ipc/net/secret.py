"""Whether both ends of a connection know the job's secret, without saying it: a challenge each, answered by HMAC.

A coordinator that has one sends ``challenge`` first of all, and hears nothing but its answer. A launcher that has one
sends ``ask``, which only a coordinator without one answers, with ``open``: then the launcher goes no further.

It keeps others out who can connect. Who can change packets on their way isn't kept out: nothing is encrypted or signed
after this.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from megatron_ft.core.errors import ConfigError, ProtocolError
from megatron_ft.core.messages.secret import Ask, Challenge, Denied, Handshake, Open, Proof, Welcome

_LEAST_BYTES, _MOST_BYTES = 16, 4096


class SecretError(ProtocolError):
    """The two ends don't have the same secret. The message says what a launcher's user can do."""


class CoordinatorHandshake:
    """The coordinator's end: it asks first. ``secret`` is None where the job has none: every launcher is let in."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = os.urandom(16).hex()
        self.is_done = secret is None

    def first(self, *, over: bool) -> Challenge | None:
        """What to send when the connection is there. ``over``: the job has ended."""
        return None if self._secret is None else Challenge(self._nonce, over)

    def answer(self, message: Handshake) -> Welcome | None:
        """What to send in return for a message, as long as it isn't ``is_done``: then the other end is let in.

        Raises:
            SecretError: it doesn't know the secret; answer it with `Denied`.
        """
        assert self._secret is not None
        if isinstance(message, Ask):
            return None  # the challenge is on its way
        if not isinstance(message, Proof) or not hmac.compare_digest(
            message.mac, _mac(self._secret, "launcher", self._nonce, message.nonce)
        ):
            raise SecretError("it doesn't know the job's secret (FT_SECRET)")
        self.is_done = True
        return Welcome(_mac(self._secret, "coordinator", message.nonce, self._nonce))


class LauncherHandshake:
    """A launcher's end."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = os.urandom(16).hex()
        self._theirs = ""
        self.is_done = secret is None

    def first(self) -> Ask | None:
        """What to send when the connection is there."""
        return None if self._secret is None else Ask()

    def answer(self, message: Handshake) -> Proof | None:
        """What to send in return for a message, as long as it isn't ``is_done``; and for any ``challenge``.

        Raises:
            SecretError: the other end doesn't know the secret, or has one where this launcher has none.
            ProtocolError: it says something else.
        """
        if self._secret is None:
            raise SecretError("asks for the job's secret: set FT_SECRET (or FT_SECRET_FILE) as on the other nodes")
        if isinstance(message, Open):
            raise SecretError("has no secret, and this launcher has one: set FT_SECRET on all nodes, or on none")
        if isinstance(message, Denied):
            raise SecretError("has another secret than this launcher: FT_SECRET has to be the same on all nodes")
        if isinstance(message, Challenge) and not self._theirs:
            self._theirs = message.nonce
            return Proof(self._nonce, _mac(self._secret, "launcher", self._theirs, self._nonce))
        if isinstance(message, Welcome) and self._theirs:
            if hmac.compare_digest(message.mac, _mac(self._secret, "coordinator", self._nonce, self._theirs)):
                self.is_done = True
                return None
            raise SecretError("doesn't know the job's secret: FT_SECRET has to be the same on all nodes")
        raise ProtocolError(f"sends {type(message).__name__} where it has to show that it knows the job's secret")


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The job's, from FT_SECRET or the file that FT_SECRET_FILE names; None where neither is set, or to "".

    Raises:
        ConfigError: it is empty, too short, too long, or has a NUL byte; or the file can't be read.
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


def _mac(secret: bytes, who: str, first: str, second: str) -> str:
    return hmac.new(secret, f"{who} {first} {second}".encode(), hashlib.sha256).hexdigest()
