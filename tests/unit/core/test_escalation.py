"""From a first signal to SIGKILL, on a clock of our own."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from megatron_ft.core.escalation import GRACE_S, Escalation

MAIN = 100


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


def test_sigkill_as_the_first_is_sent_once() -> None:
    escalation = Escalation(signal.SIGKILL, due_s=0.0)
    assert escalation.advance(0.0, idle) == signal.SIGKILL
    assert escalation.advance(GRACE_S, idle) is None
    assert escalation.due_s is None


def test_a_process_that_gets_no_cpu_has_more_time() -> None:
    escalation = Escalation(signal.SIGTERM, due_s=0.0)
    escalation.advance(0.0, idle)
    assert escalation.advance(GRACE_S, lambda: {MAIN: 3_000_000_000}) is None
    assert escalation.due_s == GRACE_S + 3.0
    assert escalation.advance(GRACE_S + 3.0, lambda: {MAIN: 3_000_000_000}) == signal.SIGKILL


def test_who_need_not_wait_begins_at_once_but_keeps_its_grace() -> None:
    escalation = Escalation(signal.SIGTERM, due_s=10.0)
    escalation.begin(2.0)
    assert escalation.advance(2.0, idle) == signal.SIGTERM
    escalation.begin(3.0)
    assert escalation.advance(3.0, idle) is None
