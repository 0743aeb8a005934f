"""From when on a rank is suspected, before its learned timeout is over."""

from __future__ import annotations

import pytest

from megatron_ft.core.timeouts.budget_rule import Known, after_kill, after_update, estimate
from megatron_ft.core.timeouts.early import CHECK_S, Early
from megatron_ft.core.timeouts.ft_state_document import parse, to_document
from megatron_ft.core.timeouts.learned import LearnedState, LearnedTimeout
from megatron_ft.core.timeouts.tail import Tail

USUAL = [10.0] * 250


def saved(known: Known, *lengths_s: float, run_s: float | None = None) -> Known:
    """After intervals of these lengths the job saves; ``run_s``: the longest of its run, if it isn't one of them."""
    tail = Tail(dict(known.tail.counts))
    tail.add(lengths_s)
    longest_s = max(*lengths_s, run_s or 0.0)
    return after_update(known, tail=tail, passed=len(lengths_s), longest_s=longest_s, first_s=0.0, factor=5.0)


def times(known: Known) -> tuple[float, float | None]:
    found = estimate(known, budget=1e-6, factor=5.0)
    assert found is not None
    return found.timeout_s, found.suspect_s


def stalled(updates: int = 10) -> Known:
    """A job with stalls that the reference wouldn't have survived."""
    known = saved(Known(), *USUAL)
    for _ in range(updates):
        known = saved(known, *USUAL, 200.0, 300.0)
    return known


@pytest.mark.parametrize("slow_s", [10.0, 20.0, 50.0])
def test_it_is_no_later_than_the_reference_would_have_terminated_the_rank(slow_s: float) -> None:
    known = Known()
    for _ in range(4):
        known = saved(known, *USUAL, slow_s, slow_s)
    timeout_s, suspect_s = times(known)
    assert (suspect_s or timeout_s) + CHECK_S < known.early.usual_s == pytest.approx(5 * slow_s, rel=0.1)


def test_what_the_reference_would_not_have_survived_makes_it_no_longer() -> None:
    usual_s, known = saved(Known(), *USUAL).early.usual_s, stalled()
    timeout_s, suspect_s = times(known)
    assert timeout_s > 200.0
    assert suspect_s is not None
    assert suspect_s < usual_s == pytest.approx(known.early.usual_s)


def test_it_stays_above_what_was_seen_while_nobody_was_suspected() -> None:
    known = saved(Known(), *USUAL, 100.0)  # before there was any timeout
    for _ in range(10):
        known = saved(known, *USUAL)
    _, suspect_s = times(known)
    assert suspect_s is None or suspect_s > 100.0


def test_that_fades() -> None:
    known = saved(Known(), *USUAL, 100.0)
    for _ in range(300):
        known = saved(known, *USUAL)
    timeout_s, suspect_s = times(known)
    assert suspect_s is not None
    assert suspect_s < min(60.0, timeout_s)


def test_a_kill_turns_it_off_until_much_more_was_seen() -> None:
    known = stalled()
    assert times(known)[1] is not None
    killed = after_kill(known)
    assert times(killed)[1] is None
    for _ in range(199):
        killed = saved(killed, *USUAL)
    assert times(killed)[1] is None
    assert saved(killed, *USUAL).early.suspect_s is not None


def test_what_was_seen_after_a_kill_is_never_suspected_again() -> None:
    """A slow step that nothing tells from a hang: it costs one restart, not one each time."""
    known = after_kill(saved(saved(Known(), *USUAL), *USUAL))
    for _ in range(200):
        known = saved(known, *USUAL, 100.0)
    timeout_s, suspect_s = times(known)
    assert timeout_s > 100.0
    assert suspect_s is None or suspect_s > 100.0


def test_a_new_run_begins_anew_as_the_reference_does() -> None:
    known = saved(Known(), *USUAL, 100.0)
    assert known.early.longest_s == pytest.approx(100.0, rel=0.1)
    known = saved(known, *USUAL, run_s=10.0)
    assert known.early.longest_s == pytest.approx(10.0, rel=0.1)


def test_intervals_of_no_length_are_no_reason_to_suspect_anybody_at_once() -> None:
    known = saved(saved(Known(), *[0.0] * 20), *[0.0] * 20)
    timeout_s, suspect_s = times(known)
    assert (suspect_s or timeout_s) > 0.0


def test_a_factor_of_one_is_no_kill() -> None:
    known = saved(Known(), *USUAL, 50.0)
    assert after_kill(known, 1.0) == known


def test_the_state_file_keeps_it_and_one_of_an_earlier_version_has_none() -> None:
    known = after_kill(saved(Known(), *USUAL, 50.0))
    state = LearnedState(sections={"step": LearnedTimeout(timeout_s=60.0, suspect_s=20.0)}, known={"step": known})
    document = to_document(state)
    again = parse(document)
    assert again.sections["step"].suspect_s == 20.0
    assert again.known["step"].early == known.early
    del document["seen"]["step"]["early"]
    assert parse(document).known["step"].early == Early()
