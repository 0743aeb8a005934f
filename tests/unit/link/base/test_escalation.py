"""From a first signal to SIGKILL, on a clock of our own; time without a CPU doesn't count, within bounds."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from megatron_ft.link.base.escalation import GRACE_S, MOST_STARVED_S, Escalation, Grace

MAIN = 100


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def test_grace_is_extended_by_a_bounded_time_in_all() -> None:
    grace, now, delay = Grace(15.0, {MAIN: 0}), 15.0, 5.0
    while not grace.check(now, {MAIN: ns(delay)}):
        now, delay = now + 5.0, delay + 5.0  # it has never run
        assert now < 100
    assert now == grace.due_s == 15.0 + MOST_STARVED_S


@pytest.mark.parametrize("delays", [{}, {MAIN: 0}, {MAIN: ns(2)}])
def test_grace_without_figures_is_over_when_it_is_due(delays: dict[int, int]) -> None:
    """The kernel doesn't count, the process is gone, or the thread's number has gone to a younger one."""
    assert Grace(15.0, {MAIN: ns(2)}).check(15.0, delays)


def idle() -> Mapping[int, int]:
    return {MAIN: 0}


def test_the_first_signal_then_sigkill_then_nothing() -> None:
    escalation = Escalation(signal.SIGTERM, due_s=10.0)
    assert escalation.advance(9.9, lambda: pytest.fail("read for nothing")) is None
    assert escalation.advance(10.0, idle) == signal.SIGTERM
    assert escalation.advance(10.0 + GRACE_S - 0.1, idle) is None
    assert escalation.advance(10.0 + GRACE_S, idle) == signal.SIGKILL
    assert escalation.due_s == 10.0 + 2 * GRACE_S
    assert escalation.advance(10.0 + 2 * GRACE_S, idle) is None
    assert escalation.due_s is None, "even SIGKILL had no effect"
    assert escalation.advance(100.0, idle) is None


def test_a_process_that_gets_no_cpu_has_more_time() -> None:
    escalation = Escalation(signal.SIGTERM, due_s=0.0)
    escalation.advance(0.0, idle)
    assert escalation.advance(GRACE_S, lambda: {MAIN: 3_000_000_000}) is None
    assert escalation.due_s == GRACE_S + 3.0
    assert escalation.advance(GRACE_S + 3.0, lambda: {MAIN: 3_000_000_000}) == signal.SIGKILL


def test_escalation_that_begins_early_keeps_its_grace() -> None:
    escalation = Escalation(signal.SIGTERM, due_s=10.0)
    escalation.begin(2.0)
    assert escalation.advance(2.0, idle) == signal.SIGTERM
    escalation.begin(3.0)
    assert escalation.advance(3.0, idle) is None
