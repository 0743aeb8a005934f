"""Minutes of ranks as rows of the event log."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Raw, Vocabulary, encode
from megatron_ft.link.facts.minutes import BOUNDS_S, RankMinute, SectionMinute, bucket_of, middle_of
from megatron_ft.link.facts.monitor import Minute

SECTION = [3, 4.5, 2.5, -1, -1, 0, [[1, 2.5]], {"32": 2, "35": 1}]


def read(*rows: Any) -> list[RankMinute]:
    """Return the rows that a report finds in a record with these."""
    body = json.dumps({"cycle": 0, "at_ns": 0, "ranks": rows}).encode()
    try:
        found = Vocabulary[Minute](Minute).read(Raw("minute", body))
    except ProtocolError:
        return []
    assert found is not None
    return [*found.ranks]


@given(st.lists(st.floats(1e-4, 1e6), max_size=20), st.floats(0, 1e5))
def test_row_survives_json(lengths_s: list[float], first_s: float) -> None:
    section = SectionMinute()
    for at, length_s in enumerate(lengths_s):
        section.add(float(at), length_s, depth=1, is_first=False)
    section.add(0.0, first_s, depth=1, is_first=True)
    row = RankMinute(5, -0.5, 60.0, sections={"step": section})
    assert read(json.loads(encode(row))) == [row]
    assert section.count == len(lengths_s) + 1
    assert sum(section.counts.values()) == len(lengths_s)
    assert section.total_s == pytest.approx(sum(lengths_s) + first_s, abs=1e-2)


@given(st.floats(BOUNDS_S[0], BOUNDS_S[-1]))
def test_length_is_known_to_14_percent(length_s: float) -> None:
    bucket = bucket_of(length_s)
    assert length_s <= BOUNDS_S[bucket]
    if bucket:
        assert BOUNDS_S[bucket - 1] < length_s
        assert abs(middle_of(bucket) / length_s - 1) < 0.14
