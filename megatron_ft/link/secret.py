"""The job's secret, which both ends of a connection prove (`link.secure_channel`), and keys derived from it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from megatron_ft.errors import ConfigError

_LEAST_BYTES, _MOST_BYTES = 16, 4096


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
