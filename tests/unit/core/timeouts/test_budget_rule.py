"""The tail of what was seen, and the timeout that is made of it."""

from __future__ import annotations

import math
import random

import pytest

from megatron_ft.core.timeouts.budget_rule import Estimate, Known, after_kill, after_update, estimate
from megatron_ft.core.timeouts.tail import BUCKETS, HALF_LIFE, Tail, bucket_of, length_of


def tail_of(*lengths_s: float) -> Tail:
    tail = Tail()
    tail.add(lengths_s)
    return tail


def learned(*lengths_s: float, updates: int = 1, factor: float = 5.0, first_s: float = 0.0) -> Known:
    known = Known()
    for _ in range(updates):
        known = after_update(
            known,
            tail=tail_of(*lengths_s),
            passed=0,
            longest_s=max(*lengths_s, first_s),
            first_s=first_s,
            factor=factor,
        )
    return known


def judged(known: Known, budget: float = 1e-6) -> Estimate:
    found = estimate(known, budget=budget, factor=5.0)
    assert found is not None
    return found


@pytest.mark.parametrize("length_s", [0.002, 0.1, 1.0, 1.09, 17.3, 3600.0, 1e5])
def test_a_bucket_is_a_tenth_wide_and_its_end_is_above_what_is_in_it(length_s: float) -> None:
    assert length_s <= length_of(bucket_of(length_s)) <= 1.1 * length_s


@pytest.mark.parametrize("length_s", [0.0, -1.0, 1e-9, 1e300])
def test_what_is_out_of_range_is_in_the_outermost_bucket(length_s: float) -> None:
    assert bucket_of(length_s) in (0, BUCKETS - 1)


def test_joining_takes_the_greater_count_and_twice_is_once() -> None:
    slow = [1.0] * 90 + [9.0] * 10
    first, second = tail_of(*slow), tail_of(*[1.0] * 95, *[9.0] * 5)
    joined = Tail.joined([first, second])
    assert joined.counts == pytest.approx(first.counts)
    assert Tail.joined([joined, first, second]).counts == pytest.approx(joined.counts)


def test_survivors_tell_all() -> None:
    tail = tail_of(0.5, 1.0, 1.0, 30.0)
    assert tail.survivors()[bucket_of(1.0)] == 3.0
    assert Tail.from_survivors(tail.survivors()).counts == tail.counts


def test_what_happened_once_is_forgotten_after_a_half_life_and_what_happened_often_later() -> None:
    once, often = tail_of(30.0), tail_of(*[30.0] * 8)
    for tail in (once, often):
        tail.forget(HALF_LIFE * 1.01)
    assert once.longest() is None
    assert often.longest() == length_of(bucket_of(30.0))
    often.forget(HALF_LIFE * 3.1)
    assert often.longest() is None
    often.forget(HALF_LIFE * 10)
    assert not often.counts


def test_nothing_seen_is_no_timeout() -> None:
    assert estimate(Known(), budget=1e-6, factor=5.0) is None


def test_few_intervals_get_no_more_than_the_reference_gives() -> None:
    found = judged(learned(*[1.0] * 16))
    assert 4.0 <= found.timeout_s <= 5.0


def test_a_steady_job_has_a_timeout_far_below_five_times_the_longest_once_much_is_known() -> None:
    rng = random.Random(1)
    known = learned(*(rng.lognormvariate(0.0, 0.03) for _ in range(20_000)), 2.0, updates=3)
    assert judged(known).timeout_s < 9.0
    assert judged(known).ceiling_s == pytest.approx(0.8 * 10.0)


def test_what_was_seen_twice_never_ends_a_rank_even_above_the_ceiling() -> None:
    known = learned(*[1.0] * 1000)
    tail = tail_of(*[1.0] * 1000, 40.0, 41.0)
    known = after_update(known, tail=tail, passed=0, longest_s=1.0, first_s=0.0, factor=5.0)
    found = judged(known)
    assert found.ceiling_s < 5.0
    assert found.timeout_s > 41.0


def test_a_smaller_budget_makes_a_longer_timeout_up_to_the_ceiling() -> None:
    rng = random.Random(2)
    known = learned(*(rng.paretovariate(2.0) for _ in range(20_000)))
    found = [judged(known, budget).timeout_s for budget in (1e-3, 1e-5, 1e-7, 1e-12)]
    assert found == sorted(found)
    assert judged(known, 1e-12).timeout_s == pytest.approx(judged(known).ceiling_s)


def test_the_tail_of_a_power_law_is_found() -> None:
    rng = random.Random(3)
    known = learned(*(rng.paretovariate(2.0) for _ in range(50_000)))
    # one in a million passes a thousand
    assert 300.0 < judged(known).budget_s < 3000.0


def test_a_kill_doubles_and_each_update_takes_a_twentieth_of_that_back() -> None:
    known = learned(*[1.0] * 1000)
    before = judged(known).timeout_s
    killed = after_kill(known)
    assert judged(killed).timeout_s == pytest.approx(2 * before)
    again = after_kill(killed)
    assert judged(again).timeout_s == pytest.approx(2 * judged(killed).timeout_s)
    after = killed
    for _ in range(14):
        after = after_update(after, tail=after.tail, passed=0, longest_s=1.0, first_s=0.0, factor=5.0)
    assert after.raised == 1.0
    assert judged(after).timeout_s == pytest.approx(before)


def test_the_first_intervals_of_a_cycle_have_a_timeout_of_their_own() -> None:
    found = judged(learned(*[1.0] * 1000, first_s=60.0))
    assert found.first_s == pytest.approx(300.0)
    assert judged(learned(*[1.0] * 1000, first_s=1.0)).first_s >= found.timeout_s / 100
    only_first = after_update(Known(), tail=Tail(), passed=0, longest_s=8.0, first_s=8.0, factor=5.0)
    assert judged(only_first).timeout_s == judged(only_first).first_s == pytest.approx(40.0)


def test_a_tail_that_forgets_keeps_being_finite() -> None:
    tail = tail_of(*[1.0] * 10)
    for _ in range(50):
        tail.forget(HALF_LIFE)
        assert math.isfinite(tail.total)


def test_a_few_quick_ones_after_slow_first_ones_make_no_short_timeout() -> None:
    few = after_update(Known(), tail=tail_of(2.0, 2.0), passed=2, longest_s=60.0, first_s=60.0, factor=5.0)
    assert judged(few).timeout_s == judged(few).first_s == pytest.approx(300.0)
