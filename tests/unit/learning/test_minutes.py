"""Minutes of ranks as rows of the event log."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.learning.minutes import (
    BOUNDS_S,
    RankMinute,
    SectionMinute,
    bucket_of,
    middle_of,
    read_rows,
    write_row,
)

SECTION = [3, 4.5, 2.5, -1, -1, 0, [1, 2.5], 32, 2, 35, 1]
ROW: list[Any] = [3, 0, 60.5, 2, [7, 0.5, 90, 59], SECTION]


def read(row: list[Any]) -> list[RankMinute]:
    return list(read_rows([row], ["step"]))


@given(st.lists(st.floats(1e-4, 1e6), max_size=20), st.floats(0, 1e5))
def test_row_survives_json(lengths_s: list[float], first_s: float) -> None:
    section = SectionMinute()
    for at, length_s in enumerate(lengths_s):
        section.add(float(at), round(length_s, 4), depth=1, is_first=False)
    section.add(0.0, round(first_s, 4), depth=1, is_first=True)
    row = write_row(RankMinute(rank=5, from_s=-0.5, to_s=60.0, sections={"step": section}), ["other", "step"])
    (again,) = read_rows(json.loads(json.dumps([row])), ["other", "step"])
    assert again.sections.keys() == {"step"}
    found = again.sections["step"]
    assert (found.count, found.counts) == (len(lengths_s) + 1, section.counts)
    assert found.total_s == pytest.approx(section.total_s, abs=1e-4)
    assert (found.longest_s, found.first_s) == (section.longest_s, section.first_s)


@given(st.floats(BOUNDS_S[0], BOUNDS_S[-1]))
def test_length_is_known_to_13_percent(length_s: float) -> None:
    bucket = bucket_of(length_s)
    assert length_s <= BOUNDS_S[bucket]
    if bucket:
        assert BOUNDS_S[bucket - 1] < length_s
        assert abs(middle_of(bucket) / length_s - 1) < 0.13


def test_lengths_beyond_the_buckets_have_one() -> None:
    assert (bucket_of(0.0), bucket_of(1e9)) == (0, len(BOUNDS_S))
    assert math.isfinite(middle_of(len(BOUNDS_S)))


@pytest.mark.parametrize("place", range(len(ROW)))
@pytest.mark.parametrize("value", [None, "x", math.nan, math.inf, 1e300, -1e300, 10**400, [], [1], {}, True, -5])
def test_damaged_row_is_left_out_or_read_as_something_sound(place: int, value: Any) -> None:
    for row in ([*ROW[:place], value, *ROW[place + 1 :]], [*ROW[:5], [*SECTION[:place], value, *SECTION[place + 1 :]]]):
        for found in read(row):
            assert found.to_s >= found.from_s
            for section in found.sections.values():
                assert all(each >= 0 for each in (section.count, section.depth, *section.counts.values()))
                assert all(0 <= bucket <= len(BOUNDS_S) for bucket in section.counts)
                assert all(math.isfinite(each) for each in (section.total_s, section.longest_s, section.open_s))


@pytest.mark.parametrize(
    "section",
    [
        SECTION[:6],
        [*SECTION, 1],
        [*SECTION[:7], len(BOUNDS_S) + 1, 1],
        [*SECTION[:7], 3.5, 1],
        [3, 4.5, -2, *SECTION[3:]],
        [0, 1.5, [0, 1.5], 1, 1.5, 0, 1.5, -1, -1],  # a row of an earlier version
    ],
)
def test_row_that_no_monitor_writes_is_left_out(section: list[Any]) -> None:
    assert len(read(ROW)) == 1
    assert read([*ROW[:5], section]) == []
