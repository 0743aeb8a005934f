"""Frames of the coordinator's messages, encoded once for all launchers that a message goes to."""

from __future__ import annotations

import functools
from typing import Any

from megatron_ft.core.job.decisions import Assignment, Decision
from megatron_ft.core.job.messages import Beat, ToMember
from megatron_ft.core.messages.secret_messages import Challenge, Welcome
from megatron_ft.ipc.wire import encode

_BEAT = encode(Beat())


def frame(message: ToMember | Challenge | Welcome) -> bytes:
    """The bytes of a message. Of a decision they differ only in the place, from one node to the next."""
    if isinstance(message, Beat) and not message.number:
        return _BEAT
    if isinstance(message, Challenge):
        return message.nonce.encode("ascii").join(_around_hex(len(message.nonce), Challenge, message.over, message.job))
    if isinstance(message, Welcome):
        return message.mac.encode("ascii").join(_around_hex(len(message.mac), Welcome))
    if not isinstance(message, Assignment) or message.place is None:
        return encode(message)
    before, after = _around_place(message.decision, message.store)
    body = b"%b%d%b" % (before, message.place, after)
    return len(body).to_bytes(4, "big") + body


@functools.lru_cache(maxsize=4)
def _around_hex(size: int, kind: type[Challenge | Welcome], *rest: Any) -> tuple[bytes, bytes]:
    """Text before and after the first field, that many digits, which need no escape; ``rest``: the other fields."""
    digits = size * "?"
    before, _, after = encode(kind(digits, *rest)).partition(digits.encode())
    return before, after


@functools.lru_cache(maxsize=4)
def _around_place(decision: Decision, store: str) -> tuple[bytes, bytes]:
    whole = encode(Assignment(decision, 0, store))[4:]
    before, place, after = whole.rpartition(b'"place":')  # in a string, a quote would have a backslash before it
    return before + place, after[1:]
