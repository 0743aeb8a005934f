"""The judgement, in simulated time: no sleep, no process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.diagnosis.evidence import with_board
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.link.base.layout import ArmedTimeout, BoardSnapshot, SectionView
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.monitor.rules.hang_detector import CONFIRM_AFTER_NS, HangDetector
from tests.fuzz.healthy import BOARD, live

S = 1_000_000_000
START = 1000 * S


def board(**changes: object) -> BoardSnapshot:
    return BOARD._replace(own_out_of_section_timeout_ns=None)._replace(**changes)


def section(name: str = "step", opened_at: int = 0, timeout: float | None = 10.0, count: int = 1) -> SectionView:
    return SectionView(name, opened_at, count, None if timeout is None else round(timeout * S))


def state(check_interval: float = 5.0, at: int = START) -> HangDetector:
    return HangDetector(check_interval_ns=round(check_interval * S), last_look_ns=at)


def is_late(watching: HangDetector, shown: BoardSnapshot, at_ns: int) -> bool:
    """Whether an interval is overdue in one reading."""
    watching.check(shown, at_ns)
    return watching.suspect is not None


def judged(watching: HangDetector, shown: BoardSnapshot, at_ns: int) -> RankHung:
    """The verdict at the second of two readings."""
    assert watching.check(shown, at_ns).verdict is None
    verdict = watching.check(shown, at_ns + CONFIRM_AFTER_NS).verdict
    assert verdict is not None
    return verdict


def test_an_overdue_section_is_a_verdict_only_at_the_second_reading() -> None:
    snapshot = board(sections=(section(opened_at=START),))
    watching = state()
    confirm_ns = START + 10 * S + CONFIRM_AFTER_NS
    assert watching.check(snapshot, START + 10 * S) == (confirm_ns, None)
    assert watching.check(snapshot, confirm_ns - 1) == (confirm_ns, None)
    found = watching.check(snapshot, confirm_ns)
    assert found.next_look_ns is None
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.section, found.verdict.since_ns) == ("section", "step", START)
    assert found.verdict.elapsed_s == 10.01


def test_time_out_of_section_is_judged_only_while_no_section_is_open() -> None:
    now = START + 20 * S
    idle = board(own_out_of_section_timeout_ns=5 * S, sections=(section(),), last_transition_ns=START)
    assert is_late(state(at=now), idle, now)
    busy = board(own_out_of_section_timeout_ns=5 * S, sections=(section(opened_at=START, timeout=None),))
    assert not is_late(state(at=now), busy, now)


@pytest.mark.parametrize(
    ("setup", "steps", "first_step_at", "bound"),
    [
        (60.0, 0, 0, 60),  # other ranks may still be in their setup
        (60.0, 1, 0, 5),  # the first "step" has been opened
        (60.0, 0, START, 5),  # an iteration is over
        (None, 0, 0, 5),
    ],
)
def test_time_out_of_section_may_last_as_setup_until_the_first_step_is_over(
    setup: float | None, steps: int, first_step_at: int, bound: int
) -> None:
    shown = board(
        sections=(section("setup", timeout=setup), section(timeout=10.0, count=steps)),
        own_out_of_section_timeout_ns=5 * S,
        last_transition_ns=START,
        first_step_at_ns=first_step_at,
    )
    watching = state()
    assert not is_late(watching, shown, START + bound * S - 1)
    assert is_late(watching, shown, START + bound * S)


def test_null_timeouts_are_infinite() -> None:
    snapshot = board(sections=(section(opened_at=START, timeout=None),))
    assert not is_late(state(at=START + 10**9 * S), snapshot, START + 10**9 * S)


def test_the_next_look_is_the_nearest_deadline_the_smallest_timeout_or_the_check_interval() -> None:
    open_late = board(sections=(section("a", START, 100.0), section("b", 0, 3.0)))
    assert state().check(open_late, START).next_look_ns == START + 3 * S
    assert state(check_interval=2.0).check(open_late, START).next_look_ns == START + 2 * S
    near = board(sections=(section("a", START, 100.0), section("b", START - 2 * S, 3.0)), start_ns=START - 3 * S)
    assert state().check(near, START).next_look_ns == START + 1 * S
    nothing = board(sections=(section(timeout=None),))
    assert state().check(nothing, START).next_look_ns == START + 5 * S


def test_the_two_mechanisms_are_independent() -> None:
    now = START + 8 * S
    beating_but_stuck = board(
        heartbeats=9,
        last_heartbeat_ns=now - 1,
        own_heartbeat_timeout_ns=100 * S,
        sections=(section(opened_at=START, timeout=7.0),),
    )
    assert judged(state(at=now), beating_but_stuck, now).kind == "section"
    moving_but_silent = board(
        heartbeats=1,
        last_heartbeat_ns=START,
        own_heartbeat_timeout_ns=7 * S,
        sections=(section(opened_at=now - 1, timeout=7.0),),
    )
    assert judged(state(at=now), moving_but_silent, now).kind == "heartbeat"


@pytest.mark.parametrize(
    ("warmup", "seen", "steps_opened", "has_step", "expected"),
    [
        (0, 0, 0, True, True),
        (3, 0, 0, True, False),
        (3, 3, 0, True, False),  # the third one runs
        (3, 4, 0, True, True),
        (3, 0, 1, True, True),  # the first "step" ends the warm-up
        (3, 0, 0, False, True),  # neither iterations nor "step": judged from the start
        (3, 1, 0, False, False),
    ],
)
def test_time_out_of_section_is_not_judged_during_the_warm_up(
    warmup: int, seen: int, steps_opened: int, has_step: bool, expected: bool
) -> None:
    now = START + 8 * S
    name = "step" if has_step else "other"
    snapshot = board(
        warmup_iterations=warmup,
        iterations_seen=seen,
        own_out_of_section_timeout_ns=7 * S,
        sections=(section(name, count=steps_opened),),
    )
    assert is_late(state(at=now), snapshot, now) == expected


@pytest.mark.parametrize("opened_at", [0, START])
@pytest.mark.parametrize(("start_timeout", "bound"), [(60, 60), (5, 10), (None, None)])
def test_a_hang_in_the_warm_up_is_noticed_after_the_timeout_of_the_start(
    opened_at: int, start_timeout: int | None, bound: int | None
) -> None:
    """Compilation may take long, but a first collective may also hang for ever."""
    snapshot = board(
        warmup_iterations=3,
        iterations_seen=1,
        own_initial_heartbeat_timeout_ns=None if start_timeout is None else start_timeout * S,
        own_out_of_section_timeout_ns=10 * S,
        sections=(section(opened_at=opened_at, count=0), section("setup")),
    )
    for seconds in (9, 59, 3600):
        at = START + seconds * S
        assert is_late(state(at=at), snapshot, at) == (bound is not None and seconds >= bound)


@pytest.mark.parametrize(
    ("warmup", "seen", "bound"),
    [(0, 0, 10), (0, 1, 100), (0, 5, 100), (0, 6, 10), (2, 2, 100), (2, 3, 10)],
)
def test_a_section_warmup_has_the_timeout_of_a_step_in_the_first_iterations(warmup: int, seen: int, bound: int) -> None:
    snapshot = board(
        warmup_iterations=warmup,
        iterations_seen=seen,
        sections=(section(opened_at=START), section("warmup", timeout=100.0, count=0)),
    )
    for seconds in (9, 11, 99, 101):
        at = START + seconds * S
        assert is_late(state(at=at), snapshot, at) == (seconds > bound)


def test_a_late_wake_up_of_the_whole_node_is_not_the_ranks_time() -> None:
    snapshot = board(sections=(section(opened_at=START, timeout=10.0),))
    watching = state(check_interval=100.0)
    assert watching.check(snapshot, START + 4 * S).next_look_ns == START + 10 * S
    # the node stood still; the monitor can't know since when, at most since its last look
    outcome = watching.check(snapshot, START + 3600 * S)
    assert outcome == (START + 3600 * S + 6 * S, None)
    assert judged(watching, snapshot, START + 3606 * S).elapsed_s == 10.01


def found_after(watching: HangDetector, snapshot: BoardSnapshot, since: int, *, late_ns: int, every: int) -> float:
    """Seconds from ``since`` to the verdict, where one of ``every`` wake-ups is late."""
    now, number = since, 0
    while now < since + 100_000 * S:
        outcome = watching.check(snapshot, now)
        if outcome.verdict is not None:
            return (now - since) / S
        assert outcome.next_look_ns is not None
        number += 1
        now = outcome.next_look_ns + (late_ns if number % every == 0 else 0)
    raise AssertionError("the hang is never found")


@pytest.mark.parametrize("every", [1, 2, 9])
@pytest.mark.parametrize("timeout", [1.0, 600.0, 3600.0])
def test_wake_ups_that_are_a_little_late_hide_no_hang(timeout: float, every: int) -> None:
    """A node that is busy isn't one that stands still, however often it wakes its monitor late."""
    snapshot = board(sections=(section(opened_at=START, timeout=timeout),))
    found = found_after(state(), snapshot, START, late_ns=120_000_000, every=every)
    # beyond the lateness itself: a quarter of the timeout, or all of a short one
    assert timeout < found < timeout * (2.5 if timeout < 10 else 1.3) + 1


def test_many_stand_stills_are_all_taken_off_and_nothing_between_them() -> None:
    snapshot = board(sections=(section(opened_at=START, timeout=1000.0),))
    watching = state(check_interval=1.0)
    now = START
    for _ in range(200):
        watching.check(snapshot, now)
        watching.check(snapshot, now + S // 2)
        now += S // 2 + 3 * S
        watching.check(snapshot, now, was_stopped=True)
    assert len(watching.gaps) <= 64
    assert not is_late(watching, snapshot, now)
    assert sum(gap.lost_ns for gap in watching.gaps) == 600 * S
    assert found_after(watching, snapshot, now, late_ns=0, every=1) == pytest.approx(900, abs=0.1)


@pytest.mark.parametrize("says_sigcont", [True, False])
def test_a_healthy_rank_is_never_ended_over_many_events(says_sigcont: bool) -> None:
    """With stops of the whole node at random moments."""
    live(20_000, says_sigcont=says_sigcont)


def test_section_with_an_extension_is_judged_again_when_it_is_over() -> None:
    """Until then the launcher's answer takes time: that is no stand-still of the node."""
    watching, shown = state(), board(sections=(section(opened_at=START),))
    watching.extend_timeout(judged(watching, shown, START + 10 * S), 13 * S)
    assert not is_late(watching, shown, START + 12 * S)
    assert judged(watching, shown, START + 13 * S).elapsed_s == 13.01


def test_time_in_which_nobody_was_to_judge_is_not_the_ranks() -> None:
    watching = state(check_interval=100.0)
    stuck = board(sections=(section(opened_at=START),))
    watching.check(stuck, START + 4 * S)
    watching.excuse(START + 5 * S, START + 505 * S)
    assert watching.check(stuck, START + 505 * S) == (START + 510 * S, None)


STEP = section("step", opened_at=START, timeout=3.0)


@pytest.mark.parametrize(
    ("shown", "left_s"),
    [
        (board(), None),
        (board(sections=(STEP,)), 1.0),
        (board(sections=(STEP, section("forward", opened_at=START + S, timeout=0.5))), -0.5),
        (board(sections=(STEP,), heartbeats=1, last_heartbeat_ns=START, own_heartbeat_timeout_ns=2 * S), 0.0),
        (board(own_out_of_section_timeout_ns=5 * S), 3.0),
        (board(sections=(STEP,), closing=True), None),
    ],
)
def test_a_note_says_how_long_its_rank_has_left(shown: BoardSnapshot, left_s: float | None) -> None:
    assert with_board(RankSnapshot(rank=0), shown, START + 2 * S).left_s == left_s


@pytest.mark.parametrize("learned", [False, True])
def test_a_verdict_says_whether_its_timeout_was_learned(learned: bool) -> None:
    mine = section(opened_at=START)._replace(is_calculated=learned)
    assert judged(state(), board(sections=(mine,)), START + 10 * S).learned is learned
    idle = board(own_out_of_section_timeout_ns=10 * S, is_out_of_section_calculated=learned)
    assert judged(state(), idle, START + 10 * S).learned is learned


def test_dismissed_verdict_is_not_found_again() -> None:
    watching, shown = state(), board(sections=(section(opened_at=START),))
    watching.dismiss(judged(watching, shown, START + 10 * S))
    assert not is_late(watching, shown, START + 11 * S)


# -- armed timeouts -----------------------------------------------------------------------------------------------


def armed(opened_at: int = START, *, count: int = 9, own: float | None = None, **more: Any) -> SectionView:
    timeout = ArmedTimeout(**{"timeout_ns": 10 * S, **more})
    return section(opened_at=opened_at, timeout=own, count=count)._replace(armed=timeout)


def test_armed_timeout_applies_instead_of_the_own_one_and_is_in_the_verdict() -> None:
    shown = board(sections=(armed(own=3.0, enforced=False),))
    watching = state(check_interval=100.0)
    assert not is_late(watching, shown, START + 10 * S - 1)
    verdict = judged(watching, shown, START + 10 * S)
    assert (verdict.timeout_s, verdict.enforced, verdict.learned) == (10.0, False, True)


def test_enforced_interval_is_judged_first_of_two_that_are_overdue() -> None:
    """The check of a report takes seconds, and must not delay a verdict on a configured timeout."""
    shown = board(sections=(armed(enforced=False), section("save", opened_at=START + 5 * S, timeout=10.0)))
    verdict = judged(state(at=START + 14 * S), shown, START + 15 * S)
    assert (verdict.section, verdict.enforced) == ("save", True)


def test_a_long_history_of_late_wake_ups_excuses_nothing_that_began_after_it() -> None:
    """Of what was long ago it isn't kept when it was; an outer section may have been open all the time."""
    began = START + 200_000 * S
    before = board(sections=(section("epoch", START, None), section("step", 0, 1000.0)))
    watching = state()
    now = START
    while now < began:
        now = (watching.check(before, now).next_look_ns or 0) + 150_000_000
    assert len(watching.gaps) <= 64
    hung = board(sections=(section("epoch", START, None), section("step", now, 1000.0)))
    assert 1000 < found_after(watching, hung, now, late_ns=150_000_000, every=1) < 1600
