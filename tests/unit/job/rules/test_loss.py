"""When a silent node is lost, and when one that is cut off ends its ranks: the progress of the ranks decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.liveness import STALLED_S, lost_s, stall_s
from megatron_ft.job.rules.member import CUT_OFF_S
from megatron_ft.job.rules.restart_policy import Outcome
from tests.support.job_machines import RULES, decision, led, member, unled
from tests.support.machines import Job, Launcher


def steps(now_s: float) -> int:
    return int(now_s)


def stops_at(end_s: float) -> Callable[[float], int]:
    """Return the steps of ranks that hang from then on."""
    return lambda now_s: int(min(now_s, end_s))


def training(names: str = "abc", **rules: object) -> tuple[Job, list[Launcher]]:
    """A cycle of three nodes that has made progress."""
    job = Job(**{"min_nodes": 2, "node_lost_s": 15.0, **rules})
    launchers = job.start(names)
    for launcher in launchers:
        launcher.progress = steps
    job.run(5.0)
    return job, launchers


def lost_after_s(job: Job, other: Launcher, within_s: float) -> float:
    """Return the seconds until another node hears that the cycle is over."""
    began_s = job.now_s
    while job.now_s < began_s + within_s:
        job.run(0.25)
        if other.ends:
            return job.now_s - began_s
    pytest.fail("no node is lost")


def test_silent_node_is_not_lost_for_ten_minutes_while_all_others_make_progress() -> None:
    job, (a, _, c) = training()
    c.is_silent = True
    after_s = lost_after_s(job, a, 700.0)
    assert 599.0 < after_s < 603.0


def test_silent_node_is_lost_in_seconds_once_no_other_node_makes_progress() -> None:
    job, (a, b, c) = training()
    c.is_silent, a.progress, b.progress = True, stops_at(job.now_s), stops_at(job.now_s)
    after_s = lost_after_s(job, a, 30.0)
    assert 5.5 <= after_s < 8.0


@pytest.mark.parametrize("had_progress", [True, False])
def test_silent_node_is_lost_after_15_s_where_only_some_of_the_others_make_progress(had_progress: bool) -> None:
    job = Job(min_nodes=2, node_lost_s=15.0)
    a, b, c = job.start("abc")
    a.progress, c.progress, b.progress = steps, steps, stops_at(5.0) if had_progress else nothing
    job.run(5.0)
    c.is_silent = True
    after_s = lost_after_s(job, a, 40.0)
    assert 14.0 < after_s < 17.0


def test_progress_before_a_restart_is_none_after_it() -> None:
    job, (a, b, c) = training(min_nodes=3)
    a.fails()
    b.progress = nothing
    job.run(3.0)
    a.ends.clear()
    c.is_silent = True
    assert 14.0 < lost_after_s(job, a, 40.0) < 17.0


def test_leader_that_hears_of_no_node_any_more_goes_by_what_they_have_told_last() -> None:
    job, launchers = training(min_nodes=1)
    (spare,) = job.start("d")
    for launcher in launchers:
        launcher.is_silent = True
    job.run(60.0)
    assert spare.begun is None


def test_nodes_that_are_all_silent_are_lost_where_none_has_told_of_progress() -> None:
    job = Job(min_nodes=1, node_lost_s=15.0)
    launchers = job.start("abc")
    (spare,) = job.start("d")
    for launcher in launchers:
        launcher.is_silent = True
    job.run(30.0)
    assert spare.begun is not None


@pytest.mark.parametrize("min_healthy", [False, True])
def test_silent_node_is_lost_after_the_configured_time_where_progress_says_nothing(min_healthy: bool) -> None:
    job = Job(min_nodes=3, node_lost_s=15.0, min_healthy=min_healthy)
    a, b, c = job.start("abc")
    a.progress = b.progress = steps if min_healthy else lambda _now_s: None
    job.run(5.0)
    c.is_silent = True
    after_s = lost_after_s(job, a, 30.0)
    assert 14.0 < after_s < 17.0


def test_job_finishes_without_a_node_that_is_silent_for_300_s_after_all_others_have_finished() -> None:
    job, (a, b, c) = training()
    c.is_silent = True
    a.finishes()
    b.finishes()
    job.run(290.0)
    assert not a.ends
    b.is_silent = True  # it has finished all the same
    job.run(15.0)
    b.is_silent = False
    assert a.ends[0].outcome is Outcome.SUCCEEDED
    told = "the job finished on 2 of 3 nodes: node 2 (c) is lost: no message from its launcher for 300.0 s"
    assert a.ends[0].text == told
    job.run(5.0)
    assert (a.left, b.left) == ((0, told), (0, told))


def cut_off_at_s(
    progress: Callable[[float], int | None], *, answered_s: float, min_healthy: bool = False, again_s: float = -1.0
) -> float:
    """Return when a launcher ends its ranks that no leader answers any more from then on; ``again_s``: a next cycle."""
    machine = led(member(replace(RULES, min_healthy=min_healthy)))
    machine.heard(Assignment(decision(), 1), 0.0)
    now_s = 0.0
    while True:
        if now_s == again_s:
            machine.heard(Assignment(decision(1, cycle=1), 1), now_s)
        effects = machine.tick(now_s, progress(now_s))
        if any(isinstance(effect, m.End) for effect in effects):
            return now_s
        if now_s < answered_s:
            machine.heard(m.Beat(), now_s)
        elif now_s == answered_s or any(isinstance(each, actions.Connect) and each.address for each in effects):
            machine.broken(now_s)
        now_s = round(now_s + 0.25, 2)


def nothing(_now_s: float) -> None:
    """Nothing tells of progress."""


@pytest.mark.parametrize(
    ("progress", "answered_s", "ends_s"),
    [
        pytest.param(stops_at(100.0), 10.0, 100.0 + STALLED_S, id="progress_ends"),
        pytest.param(stops_at(1000.0), 10.0, 9.75 + 600.0, id="progress_goes_on_for_ten_minutes"),
        pytest.param(nothing, 10.0, 9.75 + CUT_OFF_S, id="progress_unknown"),
        # no sooner than the leader counts as silent
        pytest.param(stops_at(1.0), 40.0, 39.75 + lost_s(4), id="progress_had_ended_before"),
    ],
)
def test_node_that_is_cut_off_ends_its_ranks_by_their_progress(
    progress: Callable[[float], int | None], answered_s: float, ends_s: float
) -> None:
    assert cut_off_at_s(progress, answered_s=answered_s) == pytest.approx(ends_s, abs=0.5)


def test_node_that_is_cut_off_ends_its_ranks_whatever_their_progress_where_nodes_go_on_without_each_other() -> None:
    at_s = cut_off_at_s(steps, answered_s=10.0, min_healthy=True)
    assert at_s == pytest.approx(9.75 + CUT_OFF_S, abs=0.5)


def test_node_is_cut_off_since_the_leaders_last_message_however_late_that_is_noticed() -> None:
    machine = led(member())
    machine.heard(Assignment(decision(), 1), 0.0)
    assert next(at_s for at_s, each in unled(machine, 0.0) if isinstance(each, m.End)) < CUT_OFF_S + 2.0


def test_progress_of_an_earlier_cycle_says_nothing_of_the_next_one() -> None:
    at_s = cut_off_at_s(lambda now_s: 5 if now_s < 39.0 else 0, answered_s=40.0, again_s=39.0)
    assert at_s == pytest.approx(39.75 + CUT_OFF_S, abs=0.5)


def test_leader_that_was_told_that_ranks_run_is_told_anew_once_they_are_ended() -> None:
    machine = led(member())
    machine.heard(Assignment(decision(), 1), 0.0)
    machine.broken(0.0)
    for now_s in range(int(CUT_OFF_S)):
        machine.tick(now_s, None)
    machine.opened(CUT_OFF_S)
    effects = machine.tick(CUT_OFF_S, None)
    assert {m.End, actions.Connect} <= set(map(type, effects))


def test_node_whose_ranks_ended_after_ten_minutes_stands_by_until_the_join_timeout_from_then_on() -> None:
    machine = led(member())
    machine.heard(Assignment(decision(), 1), 0.0)
    machine.broken(0.0)
    at_s = {type(effect): now_s for now_s, effect in unled(machine, 0.0, steps)}
    assert at_s[m.End] == pytest.approx(600.0, abs=1.5)
    assert at_s[m.Dismiss] == pytest.approx(600.0 + RULES.join_timeout_s, abs=3.0)


def test_time_without_progress_is_measured_by_the_longest_gap_so_far() -> None:
    assert [stall_s(8, gap_s) for gap_s in (0.1, 4.0, 60.0)] == [6.0, 7.0, 16.0]
