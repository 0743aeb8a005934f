"""The answers of a node health service, read without its library."""

from __future__ import annotations

import json

import pytest

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.node_service import REQUEST, judge, socket_of


def answer(success: int = 1, output: object = None, code: int = 0, error: str = "") -> bytes:
    """As protobuf writes it: what is 0 or empty isn't there; a negative number has ten bytes."""
    told = b"" if output is None else (output if isinstance(output, str) else json.dumps(output)).encode()
    parts = [bytes((0x08, success)) if success else b""]
    if code:
        number, written = code % 2**64, bytearray()
        while number >= 0x80:
            written.append(number & 0x7F | 0x80)
            number >>= 7
        parts.append(bytes((0x10, *written, number)))
    parts += [bytes((tag, len(text))) + text for tag, text in ((0x1A, told), (0x22, error.encode())) if text]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (answer(output={"fail_count": 0}), ""),
        (answer(output={"fail_count": 0}) + b"\x29" + bytes(8) + b"\x35" + bytes(4), ""),
        (answer(output={"fail_count": 2, "failed_checks": ["ib0"]}), "fail_count is 2, failed checks: '[\"ib0\"]'"),
        (answer(output={}), "the check's output has no fail_count"),
        (answer(output="[1]"), "the check's output has no fail_count"),
        (answer(output="oops"), "the check's output isn't JSON: 'oops'"),
        (answer(0, {"fail_count": 0}, 3, "GPU 5"), "the check failed with code 3: 'GPU 5'"),
        (answer(0), "the check failed with code 0"),
        (b"", "the check failed with code 0"),
    ],
)
def test_what_an_answer_means(given: bytes, why: str) -> None:
    assert judge(given) == why


@pytest.mark.parametrize("given", [b"\x08", b"\x1a\x05ab", b"\x0b", b"\xff" * 12, b"HTTP/1.1 400"])
def test_what_is_none(given: bytes) -> None:
    with pytest.raises(ProtocolError):
        judge(given)


def test_the_question() -> None:
    assert REQUEST == b"\n\n--no-slurm"


@pytest.mark.parametrize(("given", "path"), [("/run/x.sock", "/run/x.sock"), ("unix:///run/x.sock", "/run/x.sock")])
def test_endpoints(given: str, path: str) -> None:
    assert socket_of(given) == path


@pytest.mark.parametrize("given", ["localhost:50051", "unix:x", "x.sock"])
def test_what_is_no_socket(given: str) -> None:
    with pytest.raises(ValueError, match="neither a path"):
        socket_of(given)
