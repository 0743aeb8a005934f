"""Goodput: hand-made lives with known answers, and the sum of all classes for any records at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.link.facts.launcher import (
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    HangReported,
    Meeting,
    Paused,
    RankExited,
    RankStarted,
    Resumed,
    RunEnded,
    SnapshotRestored,
)
from megatron_ft.link.facts.minutes import RankMinute, SectionMinute
from megatron_ft.link.facts.monitor import Attached, FirstIteration, Minute, RankGone
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.records.rules.accounting import Accounting, Goodput, Ledger, TimeClass
from tests.support.accounts import account

S = 1_000_000_000
WALL = 1_790_000_000 * S
"""The events' own moments are on a clock that began then."""

At = tuple[float, Record]


def timed(events: list[At]) -> list[Timed[Record]]:
    return [Timed(WALL + int(at * S), WALL, "node-a", record) for at, record in events]


def goodput(*events: At) -> Goodput:
    found = account(timed(list(events))).goodput
    assert found is not None
    return found


def seconds(found: Goodput | None) -> dict[str, float]:
    """The classes that aren't empty."""
    assert found is not None
    return {each.value: round(s, 6) for each, s in found.seconds.items() if s}


def begins(cycle: int, at: float, iteration: int, *, training: float) -> list[At]:
    """Met at ``at``, created, script begun and attached a second each later; training from ``training`` on."""
    created, moment = at + 1, lambda s: int(s * S)
    started = CycleStarted(
        cycle=cycle, ranks=(RankStarted(rank=0),), met_ns=moment(at), spawned_ns=moment(created), world_size=1
    )
    attached = Attached(rank=0, cycle=cycle, pid=1, at_ns=moment(at + 3), user_code_ns=moment(at + 2))
    first = FirstIteration(rank=0, cycle=cycle, iteration=iteration, at_ns=moment(training))
    return [(created, started), (at + 3, attached), (training, first)]


def ends(cycle: int, at: float, iteration: int, outcome: str = "failed") -> At:
    cause = Cause(rank=0, kind=CauseKind.CRASH) if outcome == "failed" else None
    return at, CycleEnded(cycle=cycle, outcome=outcome, cause=cause, iteration=iteration)


def crash(cycle: int, at: float) -> At:
    return at, RankExited(rank=0, cycle=cycle, exitcode=1, at_ns=int(at * S))


def hang(cycle: int, since: float, at: float) -> At:
    times: dict[str, Any] = {"at_ns": int(at * S), "since_ns": int(since * S)}
    return at, RankHung(rank=0, cycle=cycle, kind="section", elapsed_s=at - since, timeout_s=5.0, **times)


def last_event(cycle: int, at: float) -> At:
    return at + 0.1, RankGone(rank=0, cycle=cycle, last_transition_ns=int(at * S))


RUN: list[At] = [
    (0.0, Meeting(how="coordinated")),
    *begins(0, 4.0, 0, training=10.0),
    crash(0, 30.0),
    ends(0, 31.0, 20),
    *begins(1, 33.0, 10, training=40.0),
    last_event(1, 60.0),
    ends(1, 61.0, 30, "succeeded"),
    (62.0, RunEnded(exit_code=0)),
]


def test_a_crash_costs_its_redone_steps_the_restart_and_the_wait_for_nodes() -> None:
    """Cycle 0 begins iterations 0 to 20 from 10 s to 30 s: 10 s of them are done again, with the unfinished one."""
    found = goodput(*RUN)
    assert seconds(found) == {
        "productive_step": pytest.approx(20 * 10 / 21 + 20, abs=1e-5),
        "redone_step": pytest.approx(20 * 11 / 21, abs=1e-5),
        "waiting_for_nodes": 4.0 + 2.0,
        "start_up": 6.0,
        "restart": 1.0 + 7.0,
        "after_the_end": 2.0,
    }
    assert (found.iterations, found.redone) == (10 + 21, 10)
    assert found.total_s == pytest.approx(62.0)
    assert found.share == pytest.approx(found.seconds[TimeClass.PRODUCTIVE] / 62.0)


def test_a_restore_from_memory_is_cut_out_of_the_restart() -> None:
    restored = SnapshotRestored(cycle=1, key=SnapshotKey(0, 0, 10), seconds=2.0)
    found = goodput(*RUN, (39.0, restored))
    assert (found.seconds[TimeClass.LOAD], found.seconds[TimeClass.RESTART]) == (2.0, 6.0)


def test_a_pause_counts_where_a_single_iteration_was_in_progress() -> None:
    """In the first run 20 iterations have passed by the end of it, in the second none."""
    paused = [(15.0, Paused()), (18.0, Resumed())]
    assert TimeClass.PAUSED.value not in seconds(goodput(*RUN, *paused))
    alone = [*RUN[:4], hang(0, 25.0, 30.0), ends(0, 31.0, 0), (32.0, RunEnded())]
    found = goodput(*alone, *paused)
    assert (found.seconds[TimeClass.PAUSED], found.seconds[TimeClass.REDONE]) == (3.0, 12.0)


def minute(cycle: int, iterations: tuple[Any, ...], save: Any = (), total: float = 0.0) -> At:
    """Of rank 0; times in seconds of its clock, ``total`` of the save sections."""
    saves = SectionMinute(1, total, total, spans=[save] if save else [])
    began = tuple(zip(iterations[::2], iterations[1::2], strict=True))
    row = RankMinute(0, 0.0, 60.0, 0, began, {"checkpointing": saves})
    return 60.0, Minute(cycle=cycle, at_ns=0, ranks=(row,))


def test_minutes_tell_when_iterations_began_and_what_saves_took() -> None:
    """Iteration 10 began at 28 s: only 2 s are done again. One save has a place, of others only the sum is known."""
    found = seconds(goodput(*RUN, minute(0, (10, 28.0, 20, 29.5), (12.0, 3.0), 3.0)))
    assert (found["redone_step"], found["checkpoint_save"]) == (2.0, 3.0)
    assert found["productive_step"] == 18.0 - 3.0 + 20.0
    found = seconds(goodput(*RUN, minute(1, (10, 40.0, 30, 59.0), (), 5.0)))
    assert found["checkpoint_save"] == 5.0


def test_iterations_done_three_times_count_once() -> None:
    """Iterations 0 to 9, again from 6, again from 2: of cycle 0 only 0 and 1 count, of cycle 1 nothing. The step in
    which the last cycle fails is lost."""
    events: list[At] = []
    for cycle, at, first, last in ((0, 0.0, 0, 10), (1, 30.0, 6, 11), (2, 60.0, 2, 11)):
        events += begins(cycle, at, first, training=at + 5.0)
        events += [crash(cycle, at + 20.0), ends(cycle, at + 21.0, last)]
    found = goodput(*events)
    assert (found.iterations, found.redone) == (2 + 0 + 9, 8 + 5)
    assert found.seconds[TimeClass.REDONE] == pytest.approx(15 * 9 / 11 + 15 + 1.5)


def test_a_life_without_iterations_has_no_goodput() -> None:
    assert account(timed([event for event in RUN if not isinstance(event[1], FirstIteration)])).goodput is None
    assert account([]) == Accounting()


def observed(cycle: int, since: float, at: float, iteration: int, rank: int = 0) -> At:
    times: dict[str, Any] = {"at_ns": int(at * S), "since_ns": int(since * S), "elapsed_s": at - since}
    known: dict[str, Any] = {"kind": "section", "section": "step", "timeout_s": 5.0, "observed_only": True}
    return at, RankHung(rank=rank, cycle=cycle, iteration=iteration, **known, **times)


def reviewed(cycle: int, since: float, at: float, iteration: int) -> At:
    text = "rank 1 in 'step', in train.py:10"
    return at, HangReported(cycle=cycle, rank=1, section="step", iteration=iteration, elapsed_s=at - since, text=text)


HUNG: list[At] = [*RUN[:4], minute(0, (0, 10.0, 20, 30.0)), observed(0, 30.0, 36.0, 20), reviewed(0, 30.0, 36.5, 20)]


def test_reported_hang_is_hung_from_its_first_second_until_the_end_of_the_cycle() -> None:
    stopped = [(100.0, CycleEnded(cycle=0, outcome="stopped", iteration=20)), (101.0, RunEnded(exit_code=1))]
    told = account(timed([*HUNG, last_event(0, 30.0), *stopped]))
    found = seconds(told.goodput)
    assert (found["hung"], found["productive_step"], found["after_the_end"]) == (70.0, 20.0, 1.0)
    (hang,) = told.hangs
    assert (hang.rank, hang.section, hang.after_s, hang.seconds, hang.went_on) == (1, "step", 30.0, 70.0, False)
    assert hang.line == "reported hang in 'step' of cycle 0 for 70 s, not restarted: rank 1 in 'step', in train.py:10"


def test_reported_hang_lasts_until_its_ranks_are_told_to_stop() -> None:
    """They take 0.4 s to stop, as on a busy node."""
    end = CycleEnded(cycle=0, outcome="stopped", iteration=20, ending_ns=round(99.6 * S))
    told = account(timed([*HUNG, last_event(0, 30.0), (100.0, end), (101.0, RunEnded(exit_code=1))]))
    found = seconds(told.goodput)
    assert (found["hung"], found["after_the_end"]) == (pytest.approx(69.6), pytest.approx(1.4))
    assert told.hangs[0].seconds == pytest.approx(69.6)


def test_goodput_falls_while_a_job_hangs_and_nothing_ends_it() -> None:
    """As the launcher feeds it, which looks at the boards of its ranks each second."""
    ledger = Ledger(WALL)
    for event in timed(HUNG):
        ledger.take(event)
    shares = []
    for now in (40, 60, 80):
        gone = RankGone(rank=0, cycle=0, iteration=20, last_transition_ns=30 * S)
        ledger.take(Timed(WALL + now * S, WALL, "", gone))
        found = ledger.accounting(WALL + now * S)
        assert found.goodput is not None
        shares.append(found.goodput.share)
        assert found.goodput.seconds[TimeClass.HUNG] == now - 30
        assert found.hangs[0].seconds == now - 30
    assert shares == sorted(shares, reverse=True)


def test_interval_that_was_reported_and_ended_counts_as_what_it_was() -> None:
    went_on = [minute(0, (21, 50.0, 30, 59.0)), last_event(0, 59.0), ends(0, 60.0, 30, "succeeded")]
    told = account(timed([*HUNG, *went_on]))
    assert "hung" not in seconds(told.goodput)
    assert [(each.seconds, each.went_on) for each in told.hangs] == [(20.0, True)]


def test_failure_that_nobody_saw_at_once_costs_one_lost_step_and_then_detection() -> None:
    """Steps of a second; the last one began at 30 s, and its rank ended 60 s later, of a timeout of its own."""
    events = [*RUN[:4], minute(0, (0, 10.0, 20, 30.0)), crash(0, 90.0), ends(0, 91.0, 20)]
    found = seconds(goodput(*events))
    assert (found["productive_step"], found["redone_step"], found["detection"]) == (20.0, 1.0, 59.0)


def test_job_that_opens_no_sections_is_productive_up_to_its_last_iteration() -> None:
    events = [*RUN[:4], minute(0, (0, 10.0, 20, 30.0)), last_event(0, 9.0), ends(0, 31.0, 20, "succeeded")]
    assert seconds(goodput(*events))["productive_step"] == 20.0


def test_start_of_the_launcher_is_a_class_of_its_own() -> None:
    assert seconds(account(timed(RUN), begin_ns=WALL - 36 * S).goodput)["launch"] == 36.0


MOMENTS = st.integers(0, 100).map(float)
CYCLES = st.integers(0, 3)
RECORDS: st.SearchStrategy[list[At]] = st.one_of(
    st.tuples(CYCLES, MOMENTS, st.integers(0, 50), MOMENTS).map(lambda a: begins(a[0], a[1], a[2], training=a[3])),
    st.tuples(CYCLES, MOMENTS, st.integers(0, 60), st.sampled_from(["failed", "succeeded", "stopped"])).map(
        lambda a: [ends(*a)]
    ),
    st.tuples(CYCLES, MOMENTS, MOMENTS).map(lambda a: [hang(a[0], min(a[1:]), max(a[1:]))]),
    st.tuples(CYCLES, MOMENTS, MOMENTS, st.integers(0, 60)).map(
        lambda a: [observed(a[0], min(a[1:3]), max(a[1:3]), a[3])]
    ),
    st.tuples(CYCLES, MOMENTS).map(lambda a: [crash(*a)]),
    st.tuples(CYCLES, MOMENTS).map(lambda a: [last_event(*a)]),
    st.tuples(MOMENTS, MOMENTS).map(lambda a: [(min(a), Paused()), (max(a), Resumed())]),
    st.tuples(CYCLES, MOMENTS, MOMENTS).map(
        lambda a: [(a[1], SnapshotRestored(cycle=a[0], key=SnapshotKey(0, 0, 1), seconds=a[2]))]
    ),
    MOMENTS.map(lambda at: [(at, Meeting(how="coordinated"))]),
    st.tuples(CYCLES, st.lists(MOMENTS, max_size=4), MOMENTS).map(
        lambda a: [minute(a[0], tuple(a[1][: len(a[1]) // 2 * 2]), (), a[2])]
    ),
)


@given(st.lists(RECORDS, max_size=12), MOMENTS, MOMENTS)
def test_the_classes_of_any_life_add_up_to_it(parts: list[list[At]], begin: float, length: float) -> None:
    """Records in any order, of moments that contradict each other, inside and outside of the life."""
    events = [event for part in parts for event in part]
    begin_ns = WALL + int(begin * S)
    found = account(timed(events), begin_ns=begin_ns, end_ns=begin_ns + int(length * S)).goodput
    if found is None:
        return
    assert found.total_s == pytest.approx(length, abs=1e-6)
    assert min(found.seconds.values()) >= 0
    assert min(found.iterations, found.redone) >= 0
