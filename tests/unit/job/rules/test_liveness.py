"""The clock of a process that may stand still."""

from __future__ import annotations

from megatron_ft.job.rules.liveness import OwnClock


def test_time_in_which_the_process_stood_still_is_not_counted() -> None:
    clock = OwnClock(100.0)
    clock.set(101.5)
    assert (clock.now_s, clock.slept_s < 0.0) == (1.5, True)
    clock.set(131.5)
    assert (clock.now_s, clock.slept_s) == (3.5, 3.5)
    clock.set(120.0)  # nor does it go back
    assert clock.now_s == 3.5


def test_process_that_waits_for_a_distant_moment_has_not_stood_still() -> None:
    clock, now_s, woken = OwnClock(0.0), 0.0, 0
    while clock.now_s < 5.0:  # the next beat of one of 10,000 launchers
        now_s, woken = clock.callers_s(5.0), woken + 1
        clock.set(now_s)
    assert (now_s, woken, clock.slept_s < 0.0) == (5.0, 5, True)
    assert clock.callers_s(2.0) == 5.0
