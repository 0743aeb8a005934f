"""Goodput: hand-made lives with known answers, and the sum of all classes for any records at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import (
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    Meeting,
    Paused,
    RankExited,
    RankStarted,
    Resumed,
    RunEnded,
    SnapshotRestored,
)
from megatron_ft.core.facts.minutes import RankMinute, SectionMinute
from megatron_ft.core.facts.monitor import Attached, FirstIteration, Minute, RankGone
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.facts.timed import Timed
from megatron_ft.core.goodput.classify import Goodput, TimeClass, classify
from megatron_ft.core.memory.snapshots import SnapshotKey

S = 1_000_000_000
WALL = 1_790_000_000 * S
"""The events' own moments are on a clock that began then."""

At = tuple[float, Record]


def timed(events: list[At]) -> list[Timed[Record]]:
    return [Timed(WALL + int(at * S), WALL, "node-a", record) for at, record in events]


def goodput(*events: At) -> Goodput:
    found = classify(timed(list(events)))
    assert found is not None
    return found


def seconds(found: Goodput) -> dict[str, float]:
    """The classes that aren't empty."""
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
    (0.0, Meeting()),
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
    assert found.restart_s == {"stop": 1.0, "spawn": 1.0, "user_code": 1.0, "imports": 1.0, "setup": 4.0}
    assert (found.iterations, found.redone) == (10 + 21, 10)
    assert found.total_s == pytest.approx(62.0)
    assert found.share == pytest.approx(found.seconds[TimeClass.PRODUCTIVE] / 62.0)


def test_time_from_a_hang_to_its_verdict_is_detection() -> None:
    events = [*RUN[:4], hang(0, 25.0, 30.0), *RUN[5:]]
    assert seconds(goodput(*events))["detection"] == 5.0


def test_a_restore_from_memory_is_cut_out_of_the_restart() -> None:
    restored = SnapshotRestored(cycle=1, key=SnapshotKey(0, 10), seconds=2.0)
    found = goodput(*RUN, (39.0, restored))
    assert (found.seconds[TimeClass.LOAD], found.restart_s["setup"]) == (2.0, 2.0)


def test_a_pause_counts_where_a_single_iteration_was_in_progress() -> None:
    """In the first run 20 iterations have passed by the end of it, in the second none."""
    paused = [(15.0, Paused()), (18.0, Resumed())]
    assert TimeClass.PAUSED.value not in seconds(goodput(*RUN, *paused))
    alone = [*RUN[:4], hang(0, 25.0, 30.0), ends(0, 31.0, 0), (32.0, RunEnded())]
    found = goodput(*alone, *paused)
    assert (found.seconds[TimeClass.PAUSED], found.seconds[TimeClass.PRODUCTIVE]) == (3.0, 12.0)


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
    """Iterations 0 to 9, again from 6, again from 2: of cycle 0 only 0 and 1 count, of cycle 1 nothing."""
    events: list[At] = []
    for cycle, at, first, last in ((0, 0.0, 0, 10), (1, 30.0, 6, 11), (2, 60.0, 2, 11)):
        events += begins(cycle, at, first, training=at + 5.0)
        events += [crash(cycle, at + 20.0), ends(cycle, at + 21.0, last)]
    found = goodput(*events)
    assert (found.iterations, found.redone) == (2 + 0 + 9, 8 + 5)
    assert found.seconds[TimeClass.REDONE] == pytest.approx(15 * 9 / 11 + 15)


def test_a_life_without_iterations_has_no_goodput() -> None:
    assert classify(timed([event for event in RUN if not isinstance(event[1], FirstIteration)])) is None
    assert classify([]) is None


MOMENTS = st.integers(0, 100).map(float)
CYCLES = st.integers(0, 3)
RECORDS: st.SearchStrategy[list[At]] = st.one_of(
    st.tuples(CYCLES, MOMENTS, st.integers(0, 50), MOMENTS).map(lambda a: begins(a[0], a[1], a[2], training=a[3])),
    st.tuples(CYCLES, MOMENTS, st.integers(0, 60), st.sampled_from(["failed", "succeeded", "stopped"])).map(
        lambda a: [ends(*a)]
    ),
    st.tuples(CYCLES, MOMENTS, MOMENTS).map(lambda a: [hang(a[0], min(a[1:]), max(a[1:]))]),
    st.tuples(CYCLES, MOMENTS).map(lambda a: [crash(*a)]),
    st.tuples(CYCLES, MOMENTS).map(lambda a: [last_event(*a)]),
    st.tuples(MOMENTS, MOMENTS).map(lambda a: [(min(a), Paused()), (max(a), Resumed())]),
    st.tuples(CYCLES, MOMENTS, MOMENTS).map(
        lambda a: [(a[1], SnapshotRestored(cycle=a[0], key=SnapshotKey(0, 1), seconds=a[2]))]
    ),
    MOMENTS.map(lambda at: [(at, Meeting())]),
    st.tuples(CYCLES, st.lists(MOMENTS, max_size=4), MOMENTS).map(
        lambda a: [minute(a[0], tuple(a[1][: len(a[1]) // 2 * 2]), (), a[2])]
    ),
)


@given(st.lists(RECORDS, max_size=12), MOMENTS, MOMENTS)
def test_the_classes_of_any_life_add_up_to_it(parts: list[list[At]], begin: float, length: float) -> None:
    """Records in any order, of moments that contradict each other, inside and outside of the life."""
    events = [event for part in parts for event in part]
    begin_ns = WALL + int(begin * S)
    found = classify(timed(events), begin_ns=begin_ns, end_ns=begin_ns + int(length * S))
    if found is None:
        return
    assert found.total_s == pytest.approx(length, abs=1e-6)
    assert min(found.seconds.values()) >= 0
    assert sum(found.restart_s.values()) == pytest.approx(found.seconds[TimeClass.RESTART], abs=1e-6)
    assert min(found.iterations, found.redone) >= 0
