"""One leader: what it decides, hands on and takes over; who founds a job; the end of the launcher with the lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import FOUNDING_S, Coordinator
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.member import HOLDER_STAYS_S
from megatron_ft.job.rules.nodes import NEW_LEADER_S
from megatron_ft.job.rules.restart_policy import Action, JobProgress, NodeState, Outcome, Reached, RestartDecision
from megatron_ft.link.facts.launcher import Cause
from tests.support.job_machines import answers, begun, decision, led, links, member, sent

LAST = Decision(3, "old.3", DecisionKind.START, 2, 3, restarts=1, founding="old.0")
RECORD = DecisionRecord(LAST, "i0:1", ("i0", "i1", "i2"), ("h0", "h1", "h2"))
RULES_3 = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3, node_lost_s=5.0)


def hello(
    place: int | None, rules: m.Rules = RULES_3, *, last: Decision = LAST, word: str = "", **more: Any
) -> m.Hello:
    """Of a launcher that trains at that place by the ``last`` decision, or of one that knows of none."""
    if place is None:
        return m.Hello("job", rules, word, word, word, **more)
    held, stands = Assignment(last, place, "i0:1"), m.NodeStatus(m.NodePhase.RUNNING, last.cycle)
    host = f"h{place}"
    return m.Hello("job", rules, f"i{place}", host, host, decided=held, standing=stands, **more)


def leader(record: DecisionRecord | None = None, rules: m.Rules = RULES_3) -> Coordinator:
    return Coordinator("c", m.JobDefinition("job", rules), record=record, parts=LEADER_PARTS)


def until(machine: Coordinator, to_s: float, *, alive: Sequence[int], from_s: float = 0.0) -> list[Any]:
    """Let time pass, in which these launchers send their beats; all effects."""
    effects: list[actions.CoordinatorEffect] = []
    now_s = from_s
    while now_s < to_s:
        now_s = min(to_s, now_s + 0.5)
        effects += [effect for link in alive for effect in machine.heard(link, m.Beat(), now_s)]
        effects += answers(machine, machine.settle(now_s), now_s)
    return effects


def ready(machine: Coordinator, *names: str, now_s: float = 0.0) -> None:
    """Launchers that know of no decision come and are ready; the connection of each is its number."""
    for link, name in enumerate(names):
        machine.heard(link, hello(None, word=name), now_s)
        machine.heard(link, m.Ready(store=f"{name}:1"), now_s)


# -- decisions ----------------------------------------------------------------------------------------------------


def test_decision_waits_until_all_of_its_members_have_answered() -> None:
    machine = leader()
    ready(machine, "a", "b", "c")
    effects = machine.settle(0.0)
    assert links(effects, m.Beat) == [0, 1, 2]
    for link in range(3):
        assert DecisionRecord not in map(type, effects)
        machine.heard(2, m.Beat(7), 0.1)  # answers another question
        effects = [*machine.heard(link, m.Beat(1), 0.1), *machine.settle(0.1)]
    assert DecisionRecord in map(type, effects)


def test_next_cycle_waits_for_a_ready_node_that_is_away_for_a_moment() -> None:
    machine = begun(RULES_3, "abc")
    for cycle in (7, 0):  # only one of them is that which runs
        machine.heard(0, m.Report(cycle, NodeState.UNHEALTHY, Cause(text="exited")), 0.5)
        assert bool(sent(machine.settle(0.5), m.End)) is (cycle == 0)
    for link in range(3):
        machine.heard(link, m.Ready(store="s"), 1.0)
    machine.broken(2, 1.0, reset=True)
    assert DecisionRecord not in map(type, until(machine, 4.0, alive=(0, 1), from_s=1.0))
    assert DecisionRecord in map(type, until(machine, 9.0, alive=(0, 1), from_s=4.0))


# -- who founds a job ---------------------------------------------------------------------------------------------


def test_leader_without_a_record_takes_over_the_newest_decision_that_any_launcher_knows() -> None:
    machine = leader()
    older = replace(LAST, number=2, id="old.2", cycle=1)
    effects = machine.heard(0, hello(0, last=older), 0.0)
    assert sent(effects, m.End) == []
    effects = machine.heard(1, hello(1), 0.5)
    # the launcher that missed the last decision has no place in it, as far as this leader knows
    assert (links(effects, m.End), links(effects, Assignment)) == ([0], [0])
    machine.heard(2, hello(2), 0.5)
    assert not sent(until(machine, FOUNDING_S - 1, alive=(0, 1, 2)), m.Verdict)
    effects = until(machine, NEW_LEADER_S + 2.0, alive=(0, 1, 2), from_s=FOUNDING_S - 1)
    (verdict,) = sent(effects, m.Verdict)
    assert (verdict.cycle, verdict.node) == (2, 0)


def test_leader_without_a_record_takes_over_no_older_decision() -> None:
    machine = leader()
    machine.heard(0, hello(0), 0.0)
    (held,) = sent(machine.heard(1, hello(1, last=replace(LAST, number=2, id="old.2", cycle=1)), 0.0), Assignment)
    assert held.decision == LAST


def test_launcher_of_an_excluded_node_founds_no_job() -> None:
    excluded = m.NodeStatus(m.NodePhase.EXCLUDED)
    rules = replace(RULES_3, min_nodes=1, max_nodes=2, last_call_s=0.0)
    machine = leader(rules=rules)
    machine.heard(0, replace(hello(None, word="x"), rules=rules, standing=excluded), 0.0)
    machine.heard(1, replace(hello(None, word="a"), rules=rules), 0.0)
    machine.heard(1, m.Ready(store="s"), 0.0)
    assert not [each for each in answers(machine, machine.settle(0.0)) if isinstance(each, DecisionRecord)]


# -- a new leader with the record -----------------------------------------------------------------------------------


def test_new_leader_waits_twelve_seconds_for_launchers_and_names_a_lost_one() -> None:
    machine = leader(RECORD)
    for place in (0, 1):
        machine.heard(place, hello(place), 0.0)
    assert not sent(until(machine, NEW_LEADER_S - 0.5, alive=(0, 1)), m.Verdict)
    effects = until(machine, NEW_LEADER_S + 1.0, alive=(0, 1), from_s=NEW_LEADER_S - 0.5)
    (verdict,) = sent(effects, m.Verdict)
    assert (verdict.node, verdict.cause.host, verdict.cause.text) == (
        2,
        "h2",
        "no message from its launcher for 12.0 s",
    )


def test_launcher_that_has_given_up_an_answer_of_a_leader_which_was_not_there_yet_is_awaited() -> None:
    machine = leader(RECORD)
    for place in range(3):
        machine.heard(place, hello(place), 0.1)
    machine.broken(1, 0.2)
    assert not sent(until(machine, 3.0, alive=(0, 2), from_s=0.2), m.Verdict)


def test_new_leader_waits_for_the_node_that_may_know_why_the_cycle_has_ended() -> None:
    machine, ended = leader(RECORD), m.NodeStatus(m.NodePhase.BUSY, LAST.cycle, ended=Outcome.FAILED)
    for place in (0, 1):
        machine.heard(place, replace(hello(place), standing=ended), 0.0)
    assert not sent(until(machine, 5.0, alive=(0, 1)), m.Verdict)
    assert links(machine.heard(2, hello(2), 5.0), m.End) == [2]
    machine.heard(2, m.Report(LAST.cycle, NodeState.UNHEALTHY, Cause(text="exited")), 5.0)
    assert [verdict.node for verdict in sent(machine.settle(5.0), m.Verdict)] == [2]


@pytest.mark.parametrize(("ended_s", "reset", "lost_s"), [(1.1, False, 0.3), (1.1, True, 5.5), (60.0, False, 5.5)])
def test_launcher_whose_connection_was_reset_or_ended_in_a_pause_of_the_leader_is_awaited(
    ended_s: float, reset: bool, lost_s: float
) -> None:
    machine = begun(RULES_3, "abc")
    for link in range(3):
        machine.heard(link, m.Beat(), 1.0)
    machine.settle(1.0)
    machine.broken(1, ended_s, reset=reset)
    assert not sent(until(machine, ended_s + lost_s - 0.1, alive=(0, 2), from_s=ended_s), m.Verdict)
    assert sent(until(machine, ended_s + lost_s + 0.1, alive=(0, 2), from_s=ended_s + lost_s), m.Verdict)


def test_launcher_that_missed_the_last_decision_hears_it_from_the_next_leader() -> None:
    machine = leader(RECORD)
    before = replace(LAST, number=2, id="old.2", cycle=1)
    waits = replace(hello(2, last=before), standing=m.NodeStatus(m.NodePhase.READY, 1))
    effects = machine.heard(2, waits, 0.0)
    assert sent(effects, Assignment) == [Assignment(LAST, 2, "i0:1")]
    machine.heard(0, hello(0), 0.0)
    machine.heard(0, m.Report(LAST.cycle, NodeState.UNHEALTHY, Cause(text="exited")), 0.1)
    assert links(machine.settle(0.1), m.End) == [0, 2]


def test_launcher_with_another_decision_of_that_number_is_told_the_last_one_and_the_end_of_its_cycle() -> None:
    machine = leader(RECORD)
    machine.heard(1, hello(1), 0.0)
    assert links(machine.heard(0, hello(0, last=replace(LAST, id="other.3")), 0.0), Assignment) == [0]
    (held,) = sent(machine.heard(2, hello(2, last=replace(LAST, number=2, id="old.2", cycle=1)), 0.0), Assignment)
    assert held.decision == LAST


def test_launcher_that_is_silent_may_come_back_where_lost_ones_are_not_restarted() -> None:
    machine = begun(m.Rules(3, 3, max_restarts=3, node_lost_s=5.0, launchers=3, last_call_s=0.1), "abc")
    assert sent(until(machine, 10.0, alive=(0, 1)), m.Verdict)
    for link in (0, 1):
        machine.heard(link, m.Ready(store="s"), 10.0)
    assert DecisionRecord not in map(type, until(machine, 30.0, alive=(0, 1), from_s=10.0))
    assert DecisionRecord in map(type, until(machine, 60.0, alive=(0, 1), from_s=30.0))


def test_cycle_without_progress_counts_though_its_node_is_lost_with_the_leader_that_judged_it() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3, launchers=3, last_call_s=0.1)
    cause, action = (
        Cause(text="rank 0 exited with code 7"),
        RestartDecision(action=Action.RESTART, restarts_left=1, reason=""),
    )
    verdict = m.Verdict(2, Outcome.FAILED, cause, action, node=0, nodes=3, reached=Reached(0, 7))
    last = replace(LAST, advance=JobProgress(0, 7))
    machine = leader(replace(RECORD, decision=last), rules)
    for link in (1, 2):
        stands = m.NodeStatus(m.NodePhase.BUSY, 2, ended=Outcome.FAILED, verdict=verdict)
        machine.heard(link, replace(hello(link, rules, last=last), standing=stands), 0.0)
        machine.heard(link, m.Ready(store="s"), 0.0)
    decided = [e.decision for e in until(machine, 60.0, alive=(1, 2)) if isinstance(e, DecisionRecord)]
    assert [(each.kind, each.advance.stalled) for each in decided] == [(DecisionKind.START, 1)]


def test_new_leader_ends_a_job_whose_launchers_it_never_meets_once_they_would_have_given_up() -> None:
    rules = m.Rules(min_nodes=4, max_nodes=4, max_restarts=5, launchers=4, last_call_s=0.1, join_timeout_s=1000.0)
    last, machine = replace(LAST, world=4), leader(rules=rules)
    for place in (0, 1, 2):
        machine.heard(place, hello(place, rules, last=last), 0.0)
    effects = until(machine, 90.0, alive=(0, 1, 2))
    decided = [each.decision for each in effects if isinstance(each, DecisionRecord)]
    assert [(each.kind, each.code) for each in decided] == [(DecisionKind.END, 94)]
    assert decided[0].text.startswith("3 nodes left")


# -- the job's end ------------------------------------------------------------------------------------------------


def finished() -> tuple[Coordinator, list[Any]]:
    """All ranks of three nodes have finished, and the end was decided."""
    machine = begun(RULES_3, "abc")
    for link in range(3):
        machine.heard(link, m.Report(0, NodeState.SUCCEEDED), 1.0)
    effects = machine.settle(1.0)
    for link in range(3):
        machine.heard(link, m.Ready(), 1.0)
    return machine, effects + machine.settle(1.0)


def test_leader_stays_until_all_launchers_have_left_after_the_end_or_a_minute() -> None:
    machine, effects = finished()
    assert links(effects, Assignment) == [0, 1, 2]
    for link in (0, 1):
        machine.broken(link, 1.1)
    assert not [each for each in machine.settle(1.1) if isinstance(each, actions.Quit)]
    machine.broken(2, 1.1, silent=True)
    assert not [each for each in until(machine, HOLDER_STAYS_S, alive=(), from_s=1.0) if isinstance(each, actions.Quit)]
    comes = replace(hello(None, word="c"), decided=Assignment(decision(), 2))
    again = machine.heard(9, replace(comes, rules=replace(RULES_3, max_nodes=3)), 60.5)
    assert [held.decision.kind for held in sent(again, Assignment)] == [DecisionKind.END]
    machine.broken(9, 60.6)
    assert [each for each in machine.settle(60.6) if isinstance(each, actions.Quit)]


def test_leader_stays_for_five_seconds_for_the_launcher_of_an_excluded_node_which_is_on_its_way_back() -> None:
    machine = begun(replace(RULES_3, min_healthy=True), "abc")
    machine.heard(2, m.Goodbye("rank 5 asked for it", excluded=True, code=0), 0.5)
    for message in (m.Report(0, NodeState.SUCCEEDED), m.Ready()):
        for link in (0, 1):
            machine.heard(link, message, 1.0)
        machine.settle(1.0)
    for link in (0, 1):
        machine.broken(link, 1.1)
    assert actions.Quit() not in until(machine, 5.9, alive=(), from_s=1.1)
    assert actions.Quit() in until(machine, 6.1, alive=(), from_s=5.9)


def test_leader_that_takes_over_after_the_end_stays_for_spares_which_it_doesn_t_know_then_quits_once() -> None:
    machine = leader(replace(RECORD, decision=replace(LAST, number=4, kind=DecisionKind.END)))
    for place in range(3):
        machine.heard(place, hello(place), 0.2)
        machine.broken(place, 0.2)
    assert actions.Quit() not in until(machine, 4.9, alive=(), from_s=0.2)
    assert sent(machine.heard(3, hello(None, word="spare", names_life=True), 4.9), Assignment)
    machine.broken(3, 4.9)
    assert actions.Quit() in machine.settle(6.0)
    assert machine.alarm_s > 6.0, "etcd may yet be asked to keep the end"


@pytest.mark.parametrize("is_running", [True, False])
def test_job_ends_when_the_launcher_that_holds_the_lock_is_asked_to_stop(is_running: bool) -> None:
    machine = begun(RULES_3, "abc")
    if not is_running:
        machine.heard(1, m.Report(0, NodeState.UNHEALTHY, Cause(text="exited")), 0.5)
        machine.settle(0.5)
    effects = machine.heard(0, m.Goodbye("its launcher received SIGTERM"), 1.0) + machine.settle(1.0)
    machine.heard(1, m.Shutdown("a later request"), 1.0)
    assert links(effects, m.Dismiss) == []  # it stays until the others know
    assert links(effects, m.End) == ([1, 2] if is_running else [])
    for link in (1, 2):
        machine.heard(link, m.Ready(store="s"), 2.0)
    effects = machine.settle(2.0)
    ((code, text),) = {(held.decision.code, held.decision.text) for held in sent(effects, Assignment)}
    assert (code, text) == (1, "node 0 (a): its launcher received SIGTERM")
    assert links(effects, Assignment) == [0, 1, 2]
    (record,) = (each for each in effects if isinstance(each, DecisionRecord))
    assert record.instances == ("a", "b", "c"), "the next leader tells them, too"


def test_job_ends_when_the_launcher_that_holds_the_lock_has_finished_and_the_others_have_not() -> None:
    machine = begun(RULES_3, "abc")
    machine.heard(0, m.Goodbye("its launcher received SIGTERM", code=0), 1.0)
    effects = until(machine, 6.0, alive=(0, 1, 2), from_s=1.0)
    assert [verdict.outcome for verdict in sent(effects, m.Verdict)] == [Outcome.STOPPED]


def test_request_to_stop_after_all_ranks_have_finished_changes_no_exit_code() -> None:
    machine = begun(RULES_3, "abc")
    for link in range(3):
        machine.heard(link, m.Report(0, NodeState.SUCCEEDED), 0.5)
    machine.settle(0.5)
    machine.heard(0, m.Goodbye("its launcher received SIGTERM", code=0), 1.0)
    machine.settle(1.0)
    for link in (1, 2):
        machine.heard(link, m.Ready(store="s"), 2.0)
    assert {(held.decision.code, held.decision.text) for held in sent(machine.settle(2.0), Assignment)} == {(0, "")}


def test_job_ends_before_its_first_cycle_when_the_launcher_that_holds_the_lock_is_asked_to_stop() -> None:
    machine = leader()
    machine.heard(0, replace(hello(None, word="a"), owns=True), 0.0)
    machine.heard(1, hello(None, word="b"), 0.0)
    effects = machine.heard(0, m.Goodbye("its launcher received SIGTERM"), 1.0)
    assert links(effects, Assignment) == [0, 1]


def test_launcher_that_holds_the_lock_waits_for_the_end_for_a_minute_when_it_is_asked_to_stop() -> None:
    machine = led(member())
    machine.owns = True
    machine.tell(m.Goodbye("its launcher received SIGTERM"), 1.0)
    left = [(now_s, each) for now_s in range(2, 70) for each in machine.heard(m.Beat(), now_s) + machine.tick(now_s)]
    assert [(now_s, each.code) for now_s, each in left if isinstance(each, m.Dismiss)] == [(61, 1)]
