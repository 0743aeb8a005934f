"""How a job ends, and what a node hears that leaves it or is left out: codes and words, by the machines themselves."""

from __future__ import annotations

from typing import Any

from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome, Reached
from tests.support.machines import Job, Launcher


def cycles(*launchers: Launcher) -> list[int | None]:
    return [launcher.cycle for launcher in launchers]


def world(launcher: Launcher) -> int:
    assert launcher.begun is not None
    return launcher.begun.decision.world


def code(launcher: Launcher) -> int:
    assert launcher.left is not None
    return launcher.left[0]


def follows(launcher: Launcher) -> tuple[Outcome, Action, int, str]:
    """What its last cycle's end leads to."""
    verdict = launcher.verdicts[-1]
    return verdict.outcome, verdict.decision.action, verdict.decision.restarts_left, verdict.decision.reason


def ended(**rules: Any) -> Job:
    """One whose coordinator stays for a spare that is still to hear of the end."""
    job = Job(min_nodes=2, max_nodes=2, **rules)
    a, b, spare = job.start("abc")
    job.run(0.5)
    spare.is_silent = True
    for node in (a, b):
        node.finishes()
    job.run(1.0)
    assert a.left == b.left == (0, "")
    assert not job.has_quit
    return job


def test_a_launcher_that_is_started_after_the_end_waits_for_the_next_life_of_the_job() -> None:
    job = ended()
    (fresh,) = job.start("b", ago_s=0.5)
    job.run(0.5)
    assert fresh.left is None
    assert not fresh.member.is_led
    job.run(65.0)
    assert job.has_quit
    assert fresh.left is None  # and looks for the next coordinator


def test_a_launcher_that_srun_has_started_late_hears_of_the_end() -> None:
    job = ended(launchers=3)
    (late,) = job.start("b", ago_s=0.5, names_life=True)
    job.run(0.5)
    assert late.left == (0, "")
    (next_step,) = job.start("b", name="the next step's job")  # which may have the same port
    job.run(0.5)
    assert next_step.left is None


def test_a_job_that_has_finished_on_some_nodes_says_so() -> None:
    job = Job(min_nodes=2, min_healthy=True)
    nodes = job.start("abc")
    nodes[1].fails()
    nodes[0].finishes()
    nodes[2].finishes()
    job.run(0.1)
    told = "the job finished on 2 of 3 nodes: node 1 (b) is unhealthy: rank 0 exited with code 7"
    assert [node.left for node in nodes] == [(0, told)] * 3
    assert [(node.ends[0].outcome, node.ends[0].text) for node in nodes] == [(Outcome.SUCCEEDED, told)] * 3


# -- nodes that are asked to stop -----------------------------------------------------------------------------


def test_launchers_that_are_all_asked_to_stop_end_well_if_their_ranks_do() -> None:
    job = Job(min_nodes=2)
    a, b, c = job.start("abc")
    for node in (b, a, c):
        assert node.verdicts == []  # nothing of the first ones' ends the others' ranks
        node.leaves("stopped by SIGTERM", code=0)
        job.run(0.9)
    assert [node.left for node in (a, b, c)] == [(0, "")] * 3
    job.run(1.0)
    assert job.has_quit


def test_launcher_stopped_well_alone_counts_as_lost_a_moment_later() -> None:
    job = Job(min_nodes=2)
    a, _, c = job.start("abc")
    c.leaves("stopped by SIGTERM", code=0)
    job.run(2.5)
    assert (c.left, a.cycle) == ((0, ""), 0)
    job.run(2.5)
    assert (a.cycle, world(a)) == (1, 2)


# -- nodes that are left out ----------------------------------------------------------------------------------


def test_failure_just_before_an_exclusion_of_the_same_node_is_what_ended_the_cycle() -> None:
    job = Job(min_nodes=2)
    a, b, _ = job.start("abc")
    b.fails("rank 1 killed by SIGKILL")
    b.report(NodeState.EXCLUDED, "rank 1 asked for it")
    job.run(0.1)
    assert (a.verdicts[0].outcome, a.verdicts[0].cause.text) == (Outcome.FAILED, "rank 1 killed by SIGKILL")


def test_job_ends_where_an_exclusion_leaves_too_few_nodes() -> None:
    job = Job(min_nodes=2, max_nodes=2)
    a, b = job.start("ab")
    b.leaves("rank 1 asked for it", excluded=True, code=0)
    job.run(1.0)
    assert b.left == (1, "1 node left, at least 2 required")
    assert follows(a) == (Outcome.MEMBERSHIP, Action.GIVE_UP, 3, "1 node left, at least 2 required, giving up")
    assert code(a) == 1


def test_a_spare_that_the_scheduler_has_started_and_that_has_not_come_yet_is_waited_for() -> None:
    job = Job(min_nodes=2, max_nodes=2, launchers=3)
    a, b = job.start("ab")
    b.leaves("rank 1 asked for it", excluded=True, code=0)
    job.run(1.0)
    assert follows(a) == (Outcome.MEMBERSHIP, Action.RESTART, 3, "")
    (c,) = job.start("c")
    job.run(2.0)
    assert (cycles(a, c), world(a), b.left) == ([1, 1], 2, None)


def test_the_launcher_of_an_excluded_node_stays_until_the_job_ends_and_has_its_code() -> None:
    job = Job(min_nodes=2, max_restarts=0)
    a, b, c = job.start("abc")
    b.leaves("rank 1 asked for it", excluded=True, code=0)
    job.run(2.0)
    assert (b.left, b.stays) == (None, True)
    assert a.verdicts[0].cause.text == "node 1 (b) leaves the job: rank 1 asked for it"
    assert follows(a) == (Outcome.MEMBERSHIP, Action.RESTART, 0, "")  # it costs no restart
    job.break_off(b)
    b.do(b.member.broken(job.now_s))
    job.run(98.0)
    assert (b.member.is_led, b.place) == (True, None)
    assert (b.left, cycles(a, c), world(a)) == (None, [1, 1], 2)
    a.fails()
    job.run(2.0)
    a.ready()
    c.ready()
    job.run(2.0)
    assert code(b) == code(a) == 1


def test_node_that_is_reconnecting_counts_as_left_after_an_exclusion() -> None:
    job = Job(min_nodes=2)
    a, b, c = job.start("abc")
    job.break_off(a)
    b.leaves("rank 1 asked for it", excluded=True, code=0)
    job.run(0.1)
    assert (b.left, b.stays) == (None, True)
    a.do(a.member.broken(job.now_s))
    job.run(3.0)
    assert cycles(a, c) == [1, 1]


def test_job_ends_at_once_where_a_stuck_node_leaves_too_few() -> None:
    job = Job(min_nodes=2, max_nodes=2)
    a, b = job.start("ab")
    b.is_quick = False
    a.fails()
    job.run(10.0)
    b.leaves("process 7 (python, state D) can't be killed", excluded=True, code=0)
    job.run(1.0)
    assert b.left == (1, "1 node left, at least 2 required")
    assert a.left == (1, "node 1 (b): process 7 (python, state D) can't be killed; 1 node left, at least 2 required")


# -- what the job has used and reached ------------------------------------------------------------------------


def test_restarts_are_counted_once_for_the_job_and_a_new_launcher_does_not_reset_them() -> None:
    job = Job(min_nodes=2, max_nodes=2, max_restarts=2)
    a, b = job.start("ab")
    a.fails()
    b.fails()
    job.run(1.0)
    assert follows(a) == follows(b) == (Outcome.FAILED, Action.RESTART, 1, "")
    b.dies()
    job.run(1.0)
    (b,) = job.start("b")
    job.run(1.0)
    assert follows(a) == (Outcome.FAILED, Action.RESTART, 0, "")
    assert cycles(a, b) == [2, 2]
    assert b.begun is not None
    assert b.begun.decision.restarts == 2
    b.fails()
    job.run(1.0)
    assert follows(a) == follows(b) == (Outcome.FAILED, Action.GIVE_UP, 0, "no restarts left, giving up")
    assert [code(a), code(b)] == [1, 1]


def test_a_newcomer_that_is_used_at_once_costs_no_restart() -> None:
    job = Job(min_nodes=1, max_nodes=3, at_once=True, last_call_s=0.2)
    (a,) = job.start("a")
    job.run(8.5)
    others = job.start("bc")
    job.run(1.0)
    assert (cycles(a, *others), world(a)) == ([1, 1, 1], 3)
    assert follows(a) == (Outcome.MEMBERSHIP, Action.RESTART, 3, "")
    assert a.verdicts[0].cause.text == "1 node waiting to join"
    assert a.lines == others[0].lines == []  # none stands by
    (spare,) = job.start("d")  # for which there is no room
    job.run(2.0)
    assert (cycles(a, spare), spare.lines[0][:10]) == ([1, None], "on standby")


def test_a_start_that_fails_in_the_same_way_is_not_tried_again_whoever_tells_of_it_first() -> None:
    job = Job(min_nodes=2, max_nodes=2, max_restarts=99, max_stalled=3)
    a, b = job.start("ab")
    failed = Reached(-1, -1, trained=False, start="ModuleNotFoundError: No module named 'x'")
    lost = "RuntimeError: gloo: Connection closed by peer"
    a.report(NodeState.UNHEALTHY, "rank 0 raised ModuleNotFoundError: No module named 'x'", reached=failed)
    job.run(1.5)
    a.report(NodeState.UNHEALTHY, lost, follows=True, reached=Reached(-1, -1, trained=False))
    b.report(NodeState.UNHEALTHY, "rank 1 raised ModuleNotFoundError: No module named 'x'", reached=failed)
    job.run(1.5)
    reason = "2 starts in a row failed in this way before the first step, giving up"
    assert follows(a) == follows(b) == (Outcome.FAILED, Action.GIVE_UP, 97, reason)
    assert [code(a), code(b)] == [93, 93]


def test_a_round_that_lacks_nodes_for_too_long_ends_the_job_and_says_to_try_again() -> None:
    job = Job(min_nodes=3, join_timeout_s=40.0)
    a, b, c = job.start("abc")
    c.dies()
    job.run(39.0)
    assert (a.left, b.left) == (None, None)
    job.run(2.0)
    assert a.left == b.left == (94, "1 more node did not join within 40 s")


def test_a_node_that_is_given_up_before_it_hears_why_its_cycle_has_ended_is_told_so() -> None:
    job = Job()
    a, b, c = job.start("abc")
    job.run(31)
    for each in (a, b, c):
        each.is_quick = False
    a.fails(follows=True)  # its cause may come from another node: the verdict waits for it
    job.run(0.05)
    assert [end.lost for end in c.ends] == [False]
    assert not c.verdicts
    job.break_off(c, silent=True)
    c.is_silent = True
    job.run(6)
    c.is_silent = False
    c.do(c.member.broken(job.now_s))
    job.run(1)
    assert [end.lost for end in c.ends] == [False, True]
    for each in (a, b, c):
        each.ready()
    job.run(2)
    assert (a.cycle, b.cycle, c.cycle) == (1, 1, 1)


def test_another_job_at_a_known_address_doesn_t_end_a_node_that_trains() -> None:
    job = Job()
    a, *_ = job.start("abc")
    job.run(31)
    a.do(a.member.heard(m.Dismiss(MISTAKE_CODE, "another job already uses this rendezvous endpoint"), job.now_s))
    assert a.left is None
    assert not a.ends


def test_job_ends_at_once_where_an_exclusion_leaves_too_few_and_a_launcher_never_came() -> None:
    job = Job(min_nodes=3, max_nodes=4, launchers=5, last_call_s=0.1)
    a, _, c, _ = job.start("abcd")
    job.run(1.0)
    a.fails()
    job.run(1.0)
    assert a.cycle == 1
    c.report(NodeState.EXCLUDED, "rank 2 asked for it")
    c.leaves("rank 2 asked for it", excluded=True)
    job.run(1.0)
    assert a.cycle == 2
    a.report(NodeState.EXCLUDED, "rank 0 asked for it")
    a.leaves("rank 0 asked for it", excluded=True)
    job.run(2.0)
    assert code(a) == 1


def test_job_ends_at_once_where_lost_launchers_are_not_restarted() -> None:
    job = Job(min_nodes=3, launchers=4)
    a, b, c, spare = job.start("abcd")
    job.run(1.0)
    spare.dies()
    job.run(1.0)
    c.dies()
    job.run(5.0)
    assert code(a) == 94
    assert "2 nodes left, at least 3 required; lost launchers are not restarted: " in a.left[1]
    assert "c, d" in a.left[1] or "d, c" in a.left[1]
    assert b.left == a.left
