"""The rules: from sketches to timeouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_ft.core.agent.suspicion import CHECK_S
from megatron_ft.core.codec import convert, decode, encode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.timeouts.budget_rule import (
    BUDGET,
    LEARNED_FLOOR_S,
    LIMIT,
    REFERENCE,
    after_kill,
    after_update,
    begin_cycle,
    learn,
)
from megatron_ft.core.timeouts.exchange import LearnedTimeout
from megatron_ft.core.timeouts.known import MOST_RAISED, Known, PastIntervals
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, bounded
from megatron_ft.core.timeouts.tail import HALF_LIFE, bucket_of, length_of, longest

FACTOR = 5.0


def sketch(*lengths_s: float, first_s: float = NO_INTERVAL, **changes: float) -> Sketch:
    """Of a cycle with one first interval, if ``first_s`` is given, and these later ones."""
    counts: dict[int, float] = {}
    for length_s in lengths_s:
        counts[bucket_of(length_s)] = counts.get(bucket_of(length_s), 0.0) + 1.0
    values = {
        "ended": len(lengths_s) + (first_s >= 0),
        "longest_s": max((*lengths_s, first_s)),
        "first_s": first_s,
        **changes,
    }
    return Sketch(tail=bounded(counts), **values)  # type: ignore[arg-type]


def updated(known: Known, *sketches: Sketch) -> Known:
    for each in sketches:
        known = after_update(known, each, factor=FACTOR)
    return known


def learned(
    known: Known, seen: Sketch | None = None, *, rule: str = BUDGET, cap_s: float | None = None
) -> LearnedTimeout:
    found = learn(known, seen or Sketch(), factor=FACTOR, rule=rule, cap_s=cap_s, previous_s=None)
    assert found is not None
    return found


STEADY = sketch(*[20.0] * 1000)
"""Steps of 20 s."""
QUICK = sketch(*[0.02] * 1000)


def end_of(length_s: float) -> float:
    return length_of(bucket_of(length_s))


# --- the estimate ---


def test_rule_learns_nothing_before_an_interval_has_ended() -> None:
    seen = sketch(open_s=100.0)
    known = updated(Known(), seen)
    assert known == Known()
    assert learn(known, seen, factor=FACTOR, rule=BUDGET, cap_s=None, previous_s=None) is None


def test_steady_steps_are_suspected_sooner_than_the_reference_ends_them() -> None:
    found = learned(updated(Known(), STEADY))
    assert found.timeout_s == pytest.approx(0.6 * 5.0 * end_of(20.0))
    assert found.timeout_s + CHECK_S < learned(updated(Known(), STEADY), rule=REFERENCE).timeout_s


def test_interval_seen_twice_is_below_the_timeout_even_where_it_is_rare() -> None:
    known = Known()
    for _ in range(30):
        known = begin_cycle(updated(known, STEADY))
    known = updated(known, sketch(*[20.0] * 1000, 500.0, 505.0))
    assert learned(known).timeout_s == pytest.approx(1.25 * end_of(500.0))


def test_interval_seen_twice_is_forgotten_after_a_few_half_lives() -> None:
    seen = sketch(*[20.0] * 1000, 500.0, 505.0)
    known = begin_cycle(updated(Known(), seen))
    assert longest(known.now.tail, 1.5) == end_of(500.0)
    known = updated(known, replace(STEADY, ended=int(HALF_LIFE * 0.6)))
    assert longest(known.now.tail, 1.5) == end_of(20.0)


def test_same_sketch_twice_counts_its_intervals_once() -> None:
    begun = begin_cycle(after_kill(updated(Known(), sketch(*[1.0] * 100, first_s=3.0))))
    once = updated(begun, STEADY)
    twice = updated(once, STEADY)
    assert twice.now == once.now
    assert (twice.ended, twice.first_s) == (once.ended, once.first_s)


def test_cumulative_sketch_replaces_the_earlier_one_of_its_cycle() -> None:
    begun = begin_cycle(updated(Known(), STEADY))
    later = sketch(*[20.0] * 2000)
    assert updated(begun, STEADY, later).now == updated(begun, later).now
    assert sum(count for _, count in updated(begun, STEADY, later).now.tail) == pytest.approx(3000, rel=0.02)


def test_new_cycle_adds_its_intervals_to_those_of_the_last() -> None:
    known = begin_cycle(updated(Known(), STEADY))
    assert known.start == known.now
    assert sum(count for _, count in updated(known, STEADY).now.tail) == pytest.approx(2000, rel=0.01)


def test_few_later_intervals_make_no_timeout_below_that_of_the_first_ones() -> None:
    found = learned(updated(Known(), sketch(2.0, 2.0, first_s=60.0)))
    assert found.timeout_s == found.first_s == pytest.approx(300.0)


# --- first intervals, and sections that have no others ---


def test_first_intervals_of_a_cycle_have_a_timeout_of_their_own() -> None:
    found = learned(updated(Known(), sketch(*[2.0] * 1000, first_s=60.0)))
    assert found.first_s == 300.0
    assert found.timeout_s < 10.0


def test_first_intervals_have_at_least_the_timeout_of_later_ones() -> None:
    found = learned(updated(Known(), sketch(*[20.0] * 1000, first_s=1.0)))
    assert found.first_s == found.timeout_s


def test_setup_that_took_long_once_comes_down_after_eight_runs() -> None:
    known = updated(Known(), sketch(first_s=2400.0))
    assert learned(known).timeout_s == 12_000.0
    for _ in range(8):
        known = updated(begin_cycle(known), sketch(first_s=60.0))
    assert learned(known).timeout_s == learned(known).first_s == 300.0


def test_first_step_that_took_long_once_comes_down_after_eight_runs() -> None:
    known = updated(Known(), sketch(*[1.0] * 2000, first_s=1800.0))
    assert learned(known).timeout_s == LEARNED_FLOOR_S
    assert learned(known).first_s == 9000.0
    for _ in range(8):
        known = updated(begin_cycle(known), sketch(*[1.0] * 2000, first_s=3.0))
    assert learned(known).first_s == 15.0


def test_cycle_without_a_first_interval_drops_none_of_earlier_cycles() -> None:
    known = updated(Known(), sketch(first_s=60.0))
    for _ in range(20):
        known = begin_cycle(known)
    assert learned(known).first_s == 300.0


# --- explained intervals ---


def test_explained_interval_raises_the_limit_only() -> None:
    plain = learned(updated(Known(), STEADY))
    told = learned(updated(Known(), replace(STEADY, explained_s=400.0)))
    assert (told.timeout_s, told.first_s) == (plain.timeout_s, plain.first_s)
    assert told.limit_s == LIMIT * 2.0 * 400.0
    assert plain.limit_s == LIMIT * learned(updated(Known(), STEADY), rule=REFERENCE).timeout_s


def test_explained_interval_fades_over_later_cycles() -> None:
    known = begin_cycle(updated(Known(), replace(STEADY, explained_s=400.0)))
    known = updated(known, replace(STEADY, ended=HALF_LIFE))
    assert known.now.explained_s == pytest.approx(200.0)


# --- the reference's rule ---


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=20), st.floats(1.0, 10.0))
def test_reference_rule_gives_what_its_formula_gives(longest_s: list[float], factor: float) -> None:
    known, expected = Known(), None
    for length_s in longest_s:
        seen = sketch(length_s, explained_s=length_s)
        known = after_update(begin_cycle(known), seen, factor=factor)
        expected = calculate_timeout(
            longest=length_s, safety_factor=factor, current=expected, current_was_calculated=expected is not None
        )
        found = learn(known, seen, factor=factor, rule=REFERENCE, cap_s=None, previous_s=None)
        assert found is not None
        assert found.timeout_s == found.first_s == max(expected, LEARNED_FLOOR_S)


def test_reference_average_takes_one_step_per_save() -> None:
    known = updated(Known(), sketch(100.0), sketch(100.0, 1.0))
    assert known.reference_s == 500.0
    known = updated(begin_cycle(known), sketch(20.0))
    assert known.reference_s == 300.0
    assert updated(known, sketch(20.0)).reference_s == 200.0


# --- estimate, floor, doubling, user's cap, in this order ---


def test_floor_is_the_least_learned_timeout() -> None:
    found = learned(updated(Known(), QUICK))
    assert found.timeout_s == found.first_s == LEARNED_FLOOR_S


def test_kill_doubles_the_floor() -> None:
    known = updated(Known(), QUICK)
    assert learned(after_kill(known)).timeout_s == 2 * LEARNED_FLOOR_S
    assert learned(after_kill(after_kill(known))).timeout_s == 4 * LEARNED_FLOOR_S


def test_kill_doubles_the_timeouts_and_the_limit() -> None:
    known = updated(Known(), sketch(*[20.0] * 1000, first_s=30.0))
    before, after = learned(known), learned(after_kill(known))
    assert (after.timeout_s, after.first_s) == (2 * before.timeout_s, 2 * before.first_s)
    assert after.raised == 2.0
    assert after.limit_s >= LIMIT * after.timeout_s


def test_users_timeout_bounds_doubling_but_not_the_estimate() -> None:
    killed = after_kill(updated(Known(), QUICK))
    assert learned(killed, cap_s=8.0).timeout_s == 8.0
    assert learned(killed, cap_s=100.0).timeout_s == 10.0
    assert learned(killed, cap_s=1.0).timeout_s == LEARNED_FLOOR_S
    steady = updated(Known(), STEADY)
    assert learned(after_kill(steady), cap_s=1.0) == replace(
        learned(steady), raised=2.0, limit_s=learned(after_kill(steady), cap_s=1.0).limit_s
    )


def test_open_interval_is_below_the_timeout_even_above_the_cap() -> None:
    seen = replace(QUICK, open_s=100.0)
    found = learned(updated(Known(), seen), seen, cap_s=8.0)
    assert found.timeout_s == found.first_s == 125.0


def test_doubling_fades_with_the_intervals_that_pass() -> None:
    known = begin_cycle(after_kill(updated(Known(), QUICK)))
    assert updated(known, QUICK).now.raised == pytest.approx(2.0 * 0.5 ** (1000 / 3400))
    assert updated(known, replace(QUICK, ended=3400)).now.raised == 1.0


def test_doubling_of_setup_fades_in_eight_cycles() -> None:
    known = after_kill(updated(Known(), sketch(first_s=60.0)))
    for _ in range(8):
        known = updated(begin_cycle(known), sketch(first_s=60.0))
    assert begin_cycle(known).now.raised == pytest.approx(1.0, abs=1e-6)


def test_doubling_holds_where_no_interval_ends() -> None:
    known = after_kill(updated(Known(), QUICK))
    for _ in range(10):
        known = begin_cycle(known)
    assert known.now.raised == 2.0


def test_survey_that_comes_after_the_kill_in_the_same_cycle_keeps_the_doubling() -> None:
    known = updated(Known(), QUICK)
    late = updated(after_kill(known), QUICK)
    assert late.now.raised == pytest.approx(2.0 * 0.5 ** (1000 / 3400))
    assert late.now.tail == known.now.tail


def test_doubling_has_an_end() -> None:
    known = updated(Known(), STEADY)
    for _ in range(100):
        known = after_kill(begin_cycle(known))
    assert known.now.raised == MOST_RAISED
    assert learned(known).timeout_s <= 1e9


def test_result_has_the_longest_interval_of_this_run_and_its_rank() -> None:
    seen = replace(STEADY, rank=3)
    found = learn(updated(Known(), seen), seen, factor=FACTOR, rule=BUDGET, cap_s=None, previous_s=7.0)
    assert found is not None
    assert (found.max_observed_s, found.rank_of_max, found.previous_s) == (20.0, 3, 7.0)


# --- in messages and in the file ---


def test_known_survives_json_in_a_few_hundred_bytes() -> None:
    known = Known()
    for cycle in range(12):
        seen = sketch(*[20.0 * 1.2**n for n in range(cycle)] * 9, *[10.0] * 99, first_s=30.125, explained_s=400.0)
        known = begin_cycle(after_kill(updated(known, seen)))
    text = encode(known)
    assert learned(decode(Known, text)).timeout_s == pytest.approx(learned(known).timeout_s, rel=1e-4)
    assert len(text) < 700
    assert decode(Known, b"{}") == Known()


@pytest.mark.parametrize(
    "value",
    [{"now": {"raised": 0.5}}, {"now": {"tail": [[300, 1]]}}, {"reference_s": -1}, {"updates": 1.5}, {"start": 3}, []],
)
def test_known_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        convert(Known, value)


def test_past_at_its_defaults_costs_nothing() -> None:
    assert encode(Known()) == b"{}"
    assert encode(PastIntervals()) == b"{}"
