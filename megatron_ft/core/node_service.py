"""Request and answer of a node health service (``nvhcd.HealthCheckService``). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
_ARGUMENT = b"--no-slurm"
REQUEST = bytes((0x0A, len(_ARGUMENT))) + _ARGUMENT
"""Protobuf message whose repeated text field 1 holds the check's arguments."""
_SUCCESS, _EXIT_CODE, _OUTPUT, _ERROR = 1, 2, 3, 4
_VARINT, _FIXED_64, _TEXT, _FIXED_32 = 0, 1, 2, 5
_SCHEME = "unix://"


def socket_of(endpoint: str) -> str:
    """Return the path of the endpoint's socket.

    Raises:
        ValueError: the endpoint is malformed.
    """
    path = endpoint.removeprefix(_SCHEME)
    if not path.startswith(("/", "./")):
        raise ValueError(f"{endpoint!r} is neither a path that begins with / or ./ nor unix://PATH")
    return path


def judge(answer: bytes) -> str:
    """Return why the node isn't fit; empty if it is.

    Raises:
        ProtocolError: the answer is malformed.
    """
    values = dict(_fields(answer))
    output, error = (_text(values.get(number, b"")) for number in (_OUTPUT, _ERROR))
    if not values.get(_SUCCESS):
        code, text = values.get(_EXIT_CODE, 0), error or output
        return f"the check failed with code {shown(code)}" + (f": {shown(text)}" if text else "")
    try:
        found = json.loads(output)
        count = found.get("fail_count") if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return f"the check's output isn't JSON: {shown(output)}"
    if count is None:
        return "the check's output has no fail_count"
    failed = json.dumps(found.get("failed_checks", []))
    return "" if count == 0 else f"fail_count is {shown(count)}, failed checks: {shown(failed)}"


def _text(value: int | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _TEXT:
            size, at = _varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            size = 8 if kind == _FIXED_64 else 4
        else:
            raise ProtocolError(f"a field of kind {kind}")
        if at + size > len(message):
            raise ProtocolError("an answer that ends early")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ProtocolError("an answer that ends early")
