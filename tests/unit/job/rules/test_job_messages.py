"""Launchers of two versions of the package meet: they refuse each other in one line, instead of falling silent."""

from __future__ import annotations

import zlib

import msgspec

from megatron_ft.job.parts import HEARD_BY_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.wire import PROTOCOL_VERSION


def test_a_message_that_launchers_of_the_last_version_refuse_raises_the_version() -> None:
    # they refuse a message of an unknown name, or without a field that has no default; other fields they pass over
    shapes = []
    for kinds in (m.TO_LEADER | HEARD_BY_PARTS, m.TO_MEMBER | SAID_BY_PARTS):
        for name, kind in sorted(Vocabulary(kinds).kinds.items()):
            fields = sorted(field.name for field in msgspec.structs.fields(kind) if field.required)
            shapes.append((name, fields))
    known = {9: 2334721058}
    assert known.get(PROTOCOL_VERSION) == zlib.crc32(repr(shapes).encode()), "raise link.wire.PROTOCOL_VERSION"
