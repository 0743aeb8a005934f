"""The launcher's machine: from a node's health to its end, by events and effects alone."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import AgentPhase
from megatron_ft.launcher.rules.events import Exit, TerminationMode
from megatron_ft.learning.messages import Killed
from megatron_ft.link.base.codec import Parts
from megatron_ft.link.base.control import WorkloadAction, WorkloadControl
from megatron_ft.link.base.process_facts import ProcessFacts
from megatron_ft.link.facts.launcher import CauseKind, NodeHealth
from megatron_ft.link.messages.monitor_messages import Collect, Release
from megatron_ft.link.wire import MAX_MESSAGE_BYTES, encode
from megatron_ft.memory.rules.snapshots import Kept
from tests.support.agents import HANG, Driven, attached, found_hung, held, observed, signalled, verdict

READY = m.Ready(Parts(Kept()))
EXCLUDE = WorkloadControl(action=WorkloadAction.ExcludeThisNode.name, description="bad memory", rank=0, pid=100)
ILL = NodeHealth(cycle=0, good=False, text="exited with code 3", exit_code=3, last_line="", seconds=0.1)
SHUTDOWN = WorkloadControl(action=WorkloadAction.ShutdownWorkload.name, description="enough", rank=0, pid=100)


def running(ranks: int = 2, **options: object) -> Driven:
    """One of two nodes, whose ranks run."""
    driven = Driven(**{"max_restarts": 3, "max_nodes": 2, **options})
    driven.run(ranks, nodes=2)
    driven.done.clear()
    return driven


def succeeded() -> Driven:
    """A node whose ranks have succeeded, like all others."""
    driven = running()
    driven.exits(0)
    driven.exits(1)
    driven.ends(Outcome.SUCCEEDED, restarts=False)
    driven.hear(events.RanksEnded(), verdict(outcome=Outcome.SUCCEEDED, action=Action.FINISH))
    return driven


def reports(driven: Driven) -> list[tuple[NodeState, str, bool]]:
    return [(each.state, each.cause.text, each.cause.follows) for each in driven.told if isinstance(each, m.Report)]


def over(driven: Driven) -> tuple[Exit, int]:
    (effect,) = driven.all_of(events.LauncherExit)
    return effect.how, effect.code


# -- before a cycle -------------------------------------------------------------------------------------------


def test_an_ill_node_stands_aside_until_it_is_fit() -> None:
    driven = Driven(checks_health=True)
    assert driven.hear(events.Tick()) == [events.CheckHealth()]
    driven.hear(replace(ILL, last_line="no disk"))
    assert driven.told == [m.NodeUnfit("exited with code 3")]
    assert driven.wait(1.9) == []
    assert driven.wait(0.2) == [events.CheckHealth()]
    driven.hear(replace(ILL, last_line="no disk"))
    assert driven.wait(4.1) == [events.CheckHealth()]
    driven.hear(replace(ILL, good=True, text="", exit_code=0))
    assert driven.told[1:] == [READY]
    assert driven.said == [
        "node health check failed: exited with code 3 (no disk); retrying in 2 s",
        "node health check failed: exited with code 3 (no disk); retrying in 4 s",
        "node health check passed after 2 failures: joining",
    ]


def test_health_check_is_retried_with_delays_of_two_seconds_to_a_minute() -> None:
    driven = Driven(checks_health=True)
    driven.hear(events.Tick())
    for delay_s in (2, 4, 8, 16, 32, 60, 60):
        driven.hear(ILL)
        assert driven.wait(delay_s - 0.1) == []
        assert driven.wait(0.2) == [events.CheckHealth()]


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (m.Dismiss(1, "rank 3 asked for it"), ["rank 3 asked for it; the job ends"]),
        (m.Dismiss(94, "too few nodes"), ["too few nodes"]),
        (m.Dismiss(0, "all finished"), ["the job ended without this node: all finished"]),
        (m.Dismiss(1), []),
    ],
)
def test_ready_node_leaves_when_the_job_ends(left: m.Dismiss, said: list[str]) -> None:
    driven = Driven()
    driven.hear(events.Tick(), left)
    assert driven.said == said
    assert over(driven) == (Exit.FAILED if said and left.code == 1 else Exit.LEFT, left.code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stands_by", [False, True])
@pytest.mark.parametrize("has_a_place", [False, True])
def test_stopped_launcher_between_cycles_leaves_well_only_from_standby(
    number: signal.Signals, stands_by: bool, has_a_place: bool
) -> None:
    driven = Driven(max_nodes=2)
    driven.hear(events.Tick(), *([replace(held(), place=None)] if stands_by else []))
    if has_a_place:
        driven.run(1, nodes=2)
        driven.exits(0, 1)
        driven.ends()
        driven.hear(events.RanksEnded(), verdict(node=0))
    is_well = stands_by and not has_a_place
    goodbye = m.Goodbye(f"its launcher received {number.name}", code=0 if is_well else 1)
    assert driven.stop(number)[2:] == [goodbye]
    assert driven.said[-1] == f"received {number.name}"
    driven.hear(m.Dismiss(1))
    assert over(driven) == (Exit.STOPPED, 130 if number == signal.SIGINT else 0 if is_well else 1)


def test_health_check_that_fails_beside_ranks_is_reported_once_and_ends_nothing() -> None:
    driven = running()
    heard = (ILL, ILL, replace(ILL, text="exited with code 4"), replace(ILL, good=True, text=""), ILL)
    for event in heard:
        driven.hear(event)
    assert [line.partition(";")[0] for line in driven.said] == [
        "node health check failed while ranks run: exited with code 3",
        "node health check failed while ranks run: exited with code 4",
        "node health check passed again while ranks run",
        "node health check failed while ranks run: exited with code 3",
    ]
    assert driven.agent.phase is AgentPhase.RUNNING
    assert driven.told == []


# -- ranks start ----------------------------------------------------------------------------------------------


def test_ranks_that_can_t_meet_are_a_failure_that_follows() -> None:
    driven = Driven()
    cause = events.Cause(kind=CauseKind.MEMBERSHIP, text="no store", follows=True)
    driven.hear(events.Tick(), held(), events.NotStarted(cause))
    assert reports(driven) == [(NodeState.UNHEALTHY, "no store", True)]
    assert driven.agent.phase is AgentPhase.RUNNING


# -- they run, and end ----------------------------------------------------------------------------------------


def test_a_failure_is_told_once_and_again_if_it_is_a_cause_after_all() -> None:
    driven = running(3)
    driven.words[0] = driven.words[0]._replace(error="RuntimeError: gloo: Connection closed by peer")
    driven.exits(0, 1)
    driven.exits(1, 1)
    assert [(state, follows) for state, _, follows in reports(driven)] == [
        (NodeState.UNHEALTHY, True),
        (NodeState.UNHEALTHY, False),
    ]
    driven.exits(2, 1)
    assert len(reports(driven)) == 2


def test_a_job_that_gives_up_waits_for_its_end() -> None:
    driven = running()
    driven.exits(0, 7)
    driven.exits(1, -15, sent=(15,))
    driven.ends(restarts=False)
    assert driven.all_of(events.TerminateRanks) == [events.TerminateRanks(TerminationMode.TERMINATED, 5.0)]
    text, reason = "rank 0 exited with code 7", "no restarts left, giving up"
    driven.hear(events.RanksEnded(), verdict(action=Action.GIVE_UP, node=0, rank=0, text=text, reason=reason))
    assert driven.said == [f"cycle 0 ended: {text}; {reason}"]
    assert driven.told[-1] == READY
    driven.hear(m.Dismiss(93))
    assert over(driven) == (Exit.FAILED, 93)
    assert driven.all_of(events.LauncherExit)[0].cause is not None


def test_coordinator_that_had_not_heard_of_the_success_goes_on_whether_it_says_why_or_not() -> None:
    assert succeeded().hear(held(1))[-1] == events.StartRanks(held(1).decision)
    driven = succeeded()
    again = verdict(outcome=Outcome.MEMBERSHIP, action=Action.RESTART, node=1, name="h1", text="silent for 6 s")
    driven.hear(again)
    assert driven.said == ["cycle 0 ended: silent for 6 s; restarting as cycle 1, no restart used"]
    assert driven.hear(again, held(1))[-1] == events.StartRanks(held(1).decision)
    assert len(driven.said) == 1


def test_processes_that_can_t_be_ended_cost_the_node() -> None:
    driven = running()
    driven.exits(0, 1)
    driven.ends()
    driven.hear(
        events.RanksEnded("process 7 (python, state D)", [ProcessFacts(pid=7)]),
        verdict(node=0, text="rank 0 exited with code 1"),
    )
    assert driven.told[-1] == m.Goodbye("process 7 (python, state D) can't be killed", excluded=True, code=0)
    driven.hear(m.Dismiss(0))
    assert driven.said == [
        "cycle 0 ended: rank 0 exited with code 1; process 7 (python, state D) can't be killed, "
        "this node leaves the job"
    ]
    assert over(driven) == (Exit.EXCLUDED, 0)


# -- hangs ----------------------------------------------------------------------------------------------------


def test_a_hang_is_told_looked_at_and_ended_by_its_monitor() -> None:
    driven = running()
    driven.hear(attached(0, 0, 1), attached(1, 0, 1), found_hung(0, 0, HANG))
    assert isinstance(driven.told[0], Hang)
    assert [each.local_rank for each in driven.orders(Collect)] == [0, 1]
    for local_rank in (0, 1):
        driven.hear(observed(local_rank, 0, RankSnapshot(rank=10 * local_rank, local_rank=local_rank)))
    assert isinstance(driven.told[-1], RankSnapshots)
    assert driven.all_of(Release) == []
    assert driven.ends() == [Release(0)]
    driven.hear(signalled(0, signal.SIGTERM))
    assert driven.all_of(events.TerminateRanks) == []
    driven.hear(signalled(0, signal.SIGKILL))
    assert driven.done[-1] == events.TerminateRanks(TerminationMode.TERMINATED, 0.1)


def test_kill_by_a_learned_timeout_is_told_and_tells_nothing_of_progress() -> None:
    driven = running()
    driven.hear(found_hung(0, 0, replace(HANG, learned=True)))
    assert [said for said in driven.told if isinstance(said, Killed)] == [Killed(0, "step", HANG.timeout_s)]
    (hang,) = (message for message in driven.told if isinstance(message, Hang))
    assert hang.reached is None


def test_notes_on_ranks_with_many_groups_are_split_into_small_messages() -> None:
    groups = {f"nccl/expert_parallel_group_{number}\u20ac": number for number in range(2500)}
    driven = running(ranks=32)
    for local_rank in range(32):
        driven.hear(attached(local_rank, 0, 1))
    driven.hear(DiagnoseHang(0))
    for local_rank in range(32):
        note = RankSnapshot(rank=10 * local_rank, local_rank=local_rank, state="S", enqueued=groups)
        driven.hear(observed(local_rank, 0, note))
    told = [each for each in driven.told if isinstance(each, RankSnapshots)]
    assert all(len(encode(each)) < MAX_MESSAGE_BYTES for each in told)
    assert [each.more for each in told] == [True] * (len(told) - 1) + [False]
    assert [note.rank for each in told for note in each.notes] == [10 * local_rank for local_rank in range(32)]
    assert len(told) > 1


# -- requests -------------------------------------------------------------------------------------------------


def test_a_rank_asks_for_its_node_to_be_left_out() -> None:
    driven = running()
    driven.hear(EXCLUDE)
    assert reports(driven) == [(NodeState.EXCLUDED, "rank 0 asked for ExcludeThisNode: bad memory", False)]
    assert driven.all_of(events.TerminateRanks) == []  # the rank may have a last word
    driven.exits(0, 1)
    driven.hear(events.RanksEnded())
    assert driven.told[-1] == m.Goodbye("rank 0 asked for ExcludeThisNode: bad memory", excluded=True, code=0)
    driven.hear(m.Dismiss(94, "too few"))
    assert driven.said[-1].endswith("; this node leaves the job, which ends: too few")
    assert over(driven) == (Exit.EXCLUDED, 1)


@pytest.mark.parametrize("has_heard", [True, False])
def test_launcher_of_an_excluded_node_can_be_stopped(has_heard: bool) -> None:
    driven = running()
    driven.hear(EXCLUDE)
    driven.exits(0, 1)
    driven.hear(events.RanksEnded(), *([m.Stay()] if has_heard else []))
    assert driven.stop()[-1] == m.Goodbye("its launcher received SIGTERM", code=0)
    driven.hear(m.Dismiss(0))
    assert over(driven) == (Exit.STOPPED, 0)


def test_a_request_of_the_last_moment_counts() -> None:
    driven = running()
    driven.exits(1, 1)
    driven.ends()
    driven.hear(EXCLUDE, events.RanksEnded(), verdict(node=0, rank=10))
    assert driven.agent.phase is AgentPhase.LEAVING


def test_a_rank_asks_for_the_end_of_the_job() -> None:
    driven = running()
    driven.hear(SHUTDOWN)
    assert driven.told == [m.Shutdown("rank 0 asked for ShutdownWorkload: enough")]
    driven.ends(Outcome.STOPPED, restarts=False)
    assert driven.all_of(events.TerminateRanks) == []
    driven.wait(5.0)
    assert driven.done[-1] == events.TerminateRanks(TerminationMode.TERMINATED, 5.0)
    driven.exits(0, -15, sent=(15,))
    driven.hear(events.RanksEnded(), verdict(outcome=Outcome.STOPPED, action=Action.GIVE_UP), m.Dismiss(1))
    assert driven.said == ["cycle 0 ended: rank 0 asked for ShutdownWorkload: enough; not restarting"]
    assert over(driven) == (Exit.FAILED, 1)


def test_a_request_that_comes_from_a_job_at_its_end_is_its_success() -> None:
    driven = Driven()
    driven.run(1)
    driven.hear(SHUTDOWN)
    driven.ends(Outcome.STOPPED, restarts=False)
    driven.exits(0)
    driven.hear(events.RanksEnded(), verdict(outcome=Outcome.STOPPED, action=Action.GIVE_UP), m.Dismiss(1))
    assert over(driven) == (Exit.SUCCEEDED, 0)


# -- signals --------------------------------------------------------------------------------------------------

KILLING = "received {} again: killing the ranks"


def signals(driven: Driven) -> list[tuple[int, bool]]:
    return [(each.number, each.whole_group) for each in driven.all_of(events.SignalRanks)]


@pytest.mark.parametrize("ranks_are_python", [True, False])
def test_a_launcher_that_is_asked_to_stop_passes_that_on_and_waits(ranks_are_python: bool) -> None:
    driven = running(ranks_are_python=ranks_are_python, term_timeout=60.0)
    driven.exits(0)
    driven.done.clear()
    assert driven.stop()[-1] == events.SignalRanks([1], signal.SIGTERM, not ranks_are_python)
    driven.wait(20.0)
    driven.stop(signal.SIGHUP)
    driven.exits(1, -15, sent=(15,))
    left_s = None if ranks_are_python else 40.0
    assert driven.done[-1] == events.TerminateRanks(TerminationMode.KILLED, 5.0, left_s)
    assert signals(driven) == [(signal.SIGTERM, not ranks_are_python), (signal.SIGHUP, not ranks_are_python)]
    driven.hear(events.RanksEnded())
    assert driven.said == [
        "received SIGTERM: forwarded to 1 rank, waiting up to 60 s (SIGINT or SIGTERM again after 5 s kills them)",
        "cycle 0 ended: stopped by SIGTERM, rank 10 killed by SIGTERM; not restarting",
    ]
    assert driven.told[-1] == m.Goodbye("its launcher received SIGTERM", code=1)
    driven.hear(m.Dismiss(1))
    assert over(driven) == (Exit.STOPPED, 1)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_request_kills_at_once(second: signal.Signals) -> None:
    driven = running()
    driven.stop()
    driven.stop(second, again=True)
    assert signals(driven) == [(signal.SIGTERM, False)]
    assert driven.said[1:] == [KILLING.format(second.name)]
    assert driven.done[-1] == events.TerminateRanks(TerminationMode.KILLED, 5.0)


@pytest.mark.parametrize("has_verdict", [False, True])
def test_a_stop_that_comes_while_a_failed_cycle_ends_leaves_out_the_restart(has_verdict: bool) -> None:
    driven = running()
    driven.hear(attached(0, 0, 1), found_hung(0, 0, HANG))
    driven.ends()
    assert driven.all_of(events.TerminateRanks) == []
    assert driven.stop()[2:] == [events.TerminateRanks(TerminationMode.TERMINATED, 0.1)]
    driven.exits(0, -9)
    driven.hear(*([verdict(node=0)] if has_verdict else []), events.RanksEnded())
    assert driven.agent.phase is AgentPhase.LEAVING
    assert driven.said[-1].endswith("; not restarting")
