"""A grace on a busy machine: what a process waits for a CPU doesn't count, within bounds."""

from __future__ import annotations

import pytest

from megatron_ft.core.cpu_starvation import MOST_STARVED_S, Grace

MAIN, OTHER = 100, 101


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def test_who_waits_for_no_cpu_has_that_time_and_no_more() -> None:
    grace = Grace(15.0, {MAIN: ns(7), OTHER: ns(900)})
    assert not grace.check(14.9, {MAIN: ns(7), OTHER: ns(900)})
    assert grace.check(15.0, {MAIN: ns(7), OTHER: ns(900)})


def test_waits_for_a_cpu_put_it_off_again_and_again() -> None:
    grace = Grace(15.0, {MAIN: ns(7)})
    assert not grace.check(15.0, {MAIN: ns(11)})
    assert grace.due_s == 19.0
    assert not grace.check(19.0, {MAIN: ns(14)})
    assert grace.due_s == 22.0
    assert grace.check(22.0, {MAIN: ns(14)})


def test_the_thread_that_waited_longest_counts() -> None:
    """The main thread may sleep until another one, which gets no CPU, is done."""
    grace = Grace(15.0, {MAIN: 0, OTHER: ns(1)})
    young = 102
    assert not grace.check(15.0, {MAIN: ns(0.5), OTHER: ns(3), young: ns(1)})
    assert grace.due_s == 17.0


def test_in_all_it_is_put_off_by_a_bounded_time() -> None:
    grace, now, delay = Grace(15.0, {MAIN: 0}), 15.0, 5.0
    while not grace.check(now, {MAIN: ns(delay)}):
        now, delay = now + 5.0, delay + 5.0  # it has never run
        assert now < 100
    assert now == grace.due_s == 15.0 + MOST_STARVED_S


@pytest.mark.parametrize("delays", [{}, {MAIN: 0}, {MAIN: ns(2)}])
def test_without_figures_it_is_over_when_it_is_due(delays: dict[int, int]) -> None:
    """The kernel doesn't count, the process is gone, or the thread's number has gone to a younger one."""
    assert Grace(15.0, {MAIN: ns(2)}).check(15.0, delays)
