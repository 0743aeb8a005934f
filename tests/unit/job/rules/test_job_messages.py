"""Launchers of two versions of the package meet: they refuse each other in one line, instead of falling silent."""

from __future__ import annotations

import zlib

import msgspec

from megatron_ft.job.parts import HEARD_BY_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.secure_channel import Challenge, Proof
from megatron_ft.link.wire import PROTOCOL_VERSION


def test_change_of_a_message_between_launchers_raises_the_version() -> None:
    shapes = []
    for kinds in (m.TO_LEADER | HEARD_BY_PARTS, m.TO_MEMBER | SAID_BY_PARTS, Challenge | Proof):
        for name, kind in sorted(Vocabulary(kinds).kinds.items()):
            written = {
                name: text for each in kind.__mro__ for name, text in vars(each).get("__annotations__", {}).items()
            }
            fields = sorted((field.name, written[field.name]) for field in msgspec.structs.fields(kind))
            shapes.append((name, fields))
    known = {12: 3224646767}
    assert known.get(PROTOCOL_VERSION) == zlib.crc32(repr(shapes).encode()), "raise link.wire.PROTOCOL_VERSION"
