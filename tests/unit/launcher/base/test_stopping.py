"""Which signals to the launcher are a second request."""

from __future__ import annotations

import signal

import pytest

from megatron_ft.launcher.base.signals import SignalWatch

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("requests", "received", "second"),
    [
        ([(TERM, 0.0), (TERM, 0.006)], [TERM], None),  # Slurm: at the time limit, at preemption
        ([(TERM, 0.0), (TERM, 0.045), (TERM, 5.0)], [TERM, TERM], TERM),
        ([(INT, 0.0), (INT, 4.9), (INT, 4.95)], [INT], None),  # the keys pressed again and again
        ([(INT, 0.0), (INT, 1.0), (INT, 5.1), (TERM, 5.2)], [INT, INT, TERM], INT),
        ([(INT, 0.0), (TERM, 1.0)], [INT, TERM], None),  # ranks may heed only one of the two
        ([(INT, 0.0), (TERM, 7.0)], [INT, TERM], TERM),
        ([(HUP, 0.0), (TERM, 9.0), (TERM, 9.1)], [HUP, TERM], None),
        ([(HUP, 0.0), (HUP, 0.1), (HUP, 9.0)], [HUP, HUP, HUP], None),
    ],
)
def test_a_second_request_is_one_that_a_person_could_have_made(
    requests: list[tuple[signal.Signals, float]], received: list[signal.Signals], second: signal.Signals | None
) -> None:
    watch = SignalWatch(())
    for number, at_s in requests:
        watch.note(number, 1000.0 + at_s)
    watch.close()
    assert watch.received == received
    taken = watch.take_requests()
    assert [number for number, _ in taken] == received
    assert next((number for number, again in taken if again), None) == second
    assert watch.take_requests() == []
    assert watch.is_in_a_hurry() == (second is not None)
