"""Messages and records as JSON: what is refused, and what travels as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import (
    NO_PARTS,
    Count,
    Finite,
    Int,
    Message,
    Parts,
    Raw,
    Seconds,
    Vocabulary,
    decode,
    encode,
    encode_as,
)
from megatron_ft.link.facts.all_kinds import RECORDS
from megatron_ft.memory.rules.snapshots import Kept, SnapshotStatus
from tests.support.arrived import logged


@pytest.mark.parametrize(
    "damaged",
    [{"ev": "cycle_ended", "cycle": "0"}, {"ev": "cycle_ended", "cycle": 3, "cause": {"text": 5}}, {"ev": "verdict"}],
)
def test_damaged_record_is_refused_and_an_unknown_one_is_none(damaged: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        RECORDS.read(logged(damaged))
    assert RECORDS.read(logged({"ev": "of_a_newer_version", "cycle": []})) is None


class Told(Message, frozen=True):
    parts: Parts = NO_PARTS


def test_parts_travel_in_a_message_that_knows_none_of_them_and_are_checked() -> None:
    told = Told(Parts(Kept(local_ranks=3), SnapshotStatus(2)))
    assert decode(Told, encode(told)) == told
    assert decode(Told, b'{"parts":{"of_a_newer_version":{},"kept":{"local_ranks":3}}}') == Told(
        Parts(Kept(local_ranks=3))
    )
    for wrong in (b'{"parts":{"kept":{"local_ranks":-1}}}', b'{"parts":{"kept":3}}', b'{"parts":[1]}', b'{"parts":7}'):
        with pytest.raises(ProtocolError):
            decode(Told, wrong)


class Held(Message, frozen=True):
    count: Count = 0
    number: Int = 0
    length_s: Seconds = 0.0
    ratio: Finite | None = None
    path: str = ""
    names: Mapping[str, str] = {}


@pytest.mark.parametrize(
    "field",
    [
        *('"count":true', '"count":1.0', '"count":-1', '"count":4611686018427387905', '"count":1e300', '"count":"1"'),
        *('"number":9223372036854775808', '"number":-9223372036854775809', f'"number":{"9" * 5000}', '"number":null'),
        *('"length_s":true', '"length_s":-0.1', '"length_s":NaN', '"length_s":Infinity', '"length_s":1e999'),
        *('"ratio":NaN', '"ratio":-Infinity', '"ratio":1e999', f'"ratio":{"1" * 400}'),
        *('"path":7', '"path":"\\ud"', '"names":{"a":1}', '"names":[]', '"path":"a'),
    ],
)
def test_value_of_another_type_or_beyond_its_bounds_is_refused(field: str) -> None:
    with_new = f'{{{field}, "new":"\\udcff"}}'.encode()
    for body in (with_new, with_new.replace(b', "new":"\\udcff"', b"")):  # by the one reader of JSON, and by the other
        with pytest.raises(ProtocolError):
            decode(Held, body)


@pytest.mark.parametrize("name", ["/tmp/\udcff", "\ud800", "a\udcfe\udcff"])
def test_path_that_is_no_text_travels_as_it_is_and_is_shown_with_question_marks(name: str) -> None:
    held = Held(count=3, path=name, names={name: name})
    assert decode(Held, encode(held)) == held
    assert decode(Held, encode_as(b'{"v":1,"\\ud800":{"\\udcff":1}', held)) == held
    found = Vocabulary[Held](Held).read(Raw("held", encode(held)))
    assert found is not None
    assert (found.count, found.path.encode()) == (3, name.encode(errors="replace"))
