"""Sketches of intervals: merging, and their size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.codec import convert, decode, encode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.timeouts.sketch import MOST_BUCKETS, Sketch, bounded, merge
from megatron_ft.core.timeouts.tail import BUCKETS, bucket_of, length_of, longest

SLOW, USUAL = bucket_of(9.0), bucket_of(1.0)

lengths = st.floats(0.0, 1e6)
sketches = st.builds(
    Sketch,
    ended=st.integers(0, 10**7),
    longest_s=lengths,
    rank=st.integers(0, 10**6),
    first_s=lengths,
    explained_s=lengths,
    open_s=lengths,
    tail=st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 10**6).map(float), max_size=20).map(bounded),
)


@pytest.mark.parametrize("length_s", [0.002, 0.1, 1.0, 1.09, 17.3, 3600.0, 1e5])
def test_bucket_end_is_above_its_lengths_by_a_tenth_at_most(length_s: float) -> None:
    assert length_s <= length_of(bucket_of(length_s)) <= 1.1 * length_s


@pytest.mark.parametrize("length_s", [0.0, -1.0, 1e-9, 1e300])
def test_length_out_of_range_is_in_the_outermost_bucket(length_s: float) -> None:
    assert bucket_of(length_s) in (0, BUCKETS - 1)


def test_slow_step_of_all_ranks_is_one_event_when_merged() -> None:
    one = Sketch(ended=100, longest_s=9.0, rank=1, tail=((USUAL, 99.0), (SLOW, 1.0)))
    other = Sketch(ended=98, longest_s=8.9, rank=0, tail=((USUAL, 97.0), (SLOW, 1.0)))
    merged = merge([one, other])
    assert merged == one
    assert longest(merged.tail, 1.5) == length_of(USUAL)


def test_merged_sketch_has_the_rank_of_the_longest_interval() -> None:
    assert merge([Sketch(longest_s=1.0, rank=0), Sketch(longest_s=2.0, rank=7), Sketch()]).rank == 7
    assert merge([Sketch(longest_s=2.0, rank=7), Sketch(longest_s=2.0, rank=3)]).rank == 3


def test_merge_of_nothing_is_an_empty_sketch() -> None:
    assert merge([]) == merge([Sketch(), Sketch()]) == Sketch()


@given(st.lists(sketches, min_size=1, max_size=5))
def test_merge_is_idempotent(given_: list[Sketch]) -> None:
    merged = merge(given_)
    assert merge([merged, merged]) == merged
    for each in given_:
        assert (longest(each.tail) or 0.0) <= (longest(merged.tail) or 0.0)


def test_bounded_tail_keeps_the_longest_intervals_and_all_counts() -> None:
    tail = bounded(dict.fromkeys(range(30), 2.0))
    assert len(tail) == MOST_BUCKETS
    assert tail[-1] == (29, 2.0)
    assert sum(count for _, count in tail) == 60.0


@given(sketches)
def test_sketch_survives_json_(sketch: Sketch) -> None:
    read = decode(Sketch, encode(sketch))
    assert (read.ended, read.rank) == (sketch.ended, sketch.rank)
    assert read.longest_s == pytest.approx(sketch.longest_s, rel=1e-5)
    assert [bucket for bucket, _ in read.tail] == [bucket for bucket, _ in sketch.tail]
    assert decode(Sketch, encode(read)) == read


def test_sketch_of_a_full_section_has_200_bytes_at_most() -> None:
    sketch = Sketch(
        ended=1_234_567,
        longest_s=1234.56789,
        rank=99_999,
        first_s=1234.56789,
        explained_s=1234.56789,
        open_s=1234.56789,
        tail=bounded({100 + n: 123_456.0 / 5**n for n in range(12)}),
    )
    assert len(encode(sketch)) <= 200


@pytest.mark.parametrize("tail", [[[256, 1]], [[-1, 1]], [[1, float("nan")]], [[1, "1"]], [[1]], [[1, True]], 3])
def test_tail_that_is_none_is_refused(tail: object) -> None:
    with pytest.raises(ProtocolError):
        convert(Sketch, [1, 1.0, 1, 1.0, 1.0, 1.0, tail])
