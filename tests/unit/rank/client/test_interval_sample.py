"""What a rank keeps of the intervals that its hooks compare with one number."""

from __future__ import annotations

import random
from collections.abc import Iterable

from megatron_ft.core.timeouts.budget_rule import FIRST_INTERVALS
from megatron_ft.core.timeouts.tail import Tail
from megatron_ft.rank.client.interval_sample import IntervalSample

SECOND = 1_000_000_000


def feed(seen: IntervalSample, lengths_s: Iterable[float]) -> int:
    """As a hook does; how many of them were noted."""
    noted = 0
    for length_s in lengths_s:
        if length_s * SECOND > seen.above_ns:
            seen.note(round(length_s * SECOND))
            noted += 1
    return noted


def test_the_first_ones_are_kept_apart() -> None:
    seen = IntervalSample()
    feed(seen, [9.0, 4.0, 3.0, 2.0, 1.0, 1.5])
    assert FIRST_INTERVALS == 4
    assert (seen.first_ns, seen.longest_ns) == (9 * SECOND, 9 * SECOND)
    tail, passed = seen.new(6)
    assert sum(tail.counts.values()) == passed == 2
    assert tail.longest() is not None
    assert 1.5 <= (tail.longest() or 0.0) < 1.7


def test_few_are_noted_and_the_tail_is_what_it_is() -> None:
    rng = random.Random(1)
    lengths = [rng.lognormvariate(0.0, 0.5) for _ in range(100_000)]
    seen = IntervalSample()
    noted = feed(seen, lengths)
    assert noted < 5_000
    tail, passed = seen.new(len(lengths))
    assert passed == len(lengths) - FIRST_INTERVALS
    whole = Tail()
    whole.add(lengths[FIRST_INTERVALS:])
    for often in (1.0, 3.0, 20.0, 100.0):
        assert tail.longest(often) == whole.longest(often)
    assert abs(tail.total - passed) < 1


def test_when_intervals_become_shorter_all_are_looked_at_again() -> None:
    seen = IntervalSample()
    feed(seen, [10.0 + 0.001 * n for n in range(3000)])
    seen.settle(3000)
    assert seen.above_ns > 9 * SECOND
    assert feed(seen, [1.0] * 3000) == 0
    seen.settle(6000)
    assert feed(seen, [1.0] * 100) == 100


def test_what_is_settled_is_not_told_again() -> None:
    seen = IntervalSample()
    feed(seen, [1.0] * 10)
    seen.settle(10)
    assert seen.new(10) == (Tail(), 0)
    feed(seen, [7.0])
    tail, passed = seen.new(11)
    assert passed == 1
    assert tail.total == 1.0
