"""What arrives of a message or a record, undecoded."""

from __future__ import annotations

import json
from typing import Any

from megatron_ft.link import wire
from megatron_ft.link.base.codec import Raw

__all__ = ["arrived", "line", "logged"]


def arrived(message: Any) -> Raw:
    """Return what arrives of a message, or of an object of JSON in its place."""
    if not isinstance(message, dict):
        return wire.decode(wire.encode(message)[wire.LENGTH_BYTES :])
    return wire.decode(json.dumps({"v": wire.PROTOCOL_VERSION, **message}).encode())


def line(document: Any) -> bytes:
    """Return a line of a log."""
    return json.dumps(document).encode()


def logged(document: dict[str, Any]) -> Raw:
    """Return what is read of a record, from its object of JSON."""
    return Raw(document["ev"], line(document))
