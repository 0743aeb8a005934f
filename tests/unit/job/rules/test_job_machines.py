"""The control plane's parts, one by one; how they work together is `test_simulation`'s."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.job.parts import HEARD_BY_PARTS, LEADER_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.rules.job_cycle import JobCycle, Seat
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.next_cycle import NextCycle
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import choose
from megatron_ft.job.rules.restart_policy import Action, JobProgress, NodeState, Outcome, RestartDecision
from megatron_ft.launcher.rules.cycle_lines import cycle_ended
from megatron_ft.link.base.codec import Parts, Vocabulary
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.memory.rules.snapshots import (
    Kept,
    KeptSnapshot,
    Restored,
    Saved,
    Settled,
    SnapshotKey,
    SnapshotStatus,
)
from tests.support import job_machines
from tests.support.agents import hung
from tests.support.arrived import arrived
from tests.support.job_machines import RULES, answers, decision, led, member


def node(name: str, rank: int | None = None, arrived: int = 0, **more: Any) -> Node:
    return job_machines.node(name, f"host-{name.lower()}", rank=rank, arrived=arrived, **more)


def names(nodes: list[Node]) -> str:
    return "".join(each.instance for each in nodes)


def test_the_first_place_by_arrival_is_that_of_the_node_that_hosts_the_coordinator() -> None:
    host = node("h", None, 9, owns=True)
    first = [node("a", None, 1), node("b", None, 2), host]
    chosen, slots = choose([], first, 9)
    assert names(chosen) == "hab"
    assert names(choose([], first, 2)[0]) == "ha"
    assert names(choose([], [node("a", 0, 1), node("b", 1, 2), host], 9)[0]) == "abh"
    ranked = node("h", 2, 9, owns=True)
    assert names(choose([], [node("a", 0, 1), node("b", 1, 2), ranked], 9)[0]) == "abh"
    # later, too, if a place is free
    taken = node("t", None, 30, owns=True)
    assert names(choose(slots, [first[0], host, node("s", None, 20), taken], 3)[0]) == "hat"


def test_nodes_keep_their_places_and_a_spare_fills_a_gap_until_its_owner_is_back() -> None:
    first = [node(name, None, index) for index, name in enumerate("abcd")]
    chosen, slots = choose([], first, 4)
    without_b = [first[0], first[2], first[3]]
    assert names(choose(slots, [*without_b, node("s", None, 9)], 4)[0]) == "ascd"
    assert names(choose(slots, without_b, 4)[0]) == "acd"  # nobody is there for it
    _, later = choose(slots, without_b, 4)
    again = node("B", None, 20)  # a new launcher on the same host
    assert names(choose(later, [*without_b, node("s", None, 9), again], 4)[0]) == "aBcd"
    assert names(chosen) == "abcd"


class Compared(str):
    """A host's name that counts how often it is compared with another one."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str(self) == other


def test_half_of_many_places_are_filled_anew_without_comparing_every_node_with_every_place() -> None:
    first = [node(f"n{index}", None, index) for index in range(600)]
    _, slots = choose([], first, 600)
    fresh = [job_machines.node(f"s{index}", Compared(f"s{index}"), arrived=900 + index) for index in range(300)]
    back = job_machines.node("back", "host-n599", arrived=2000)
    chosen, _ = choose(slots, [*first[:299], *fresh, back], 600)
    assert [each.instance for each in chosen[298:301]] == ["n298", "s0", "s1"]
    assert chosen[599] is back
    assert Compared.count < 3000


class Meeting:
    """Nodes that meet after a cycle of ``last`` nodes, or for the first one."""

    def __init__(self, last: int = 0, outcome: Outcome = Outcome.FAILED) -> None:
        self.nodes: dict[str, Node] = {}
        self.machine = NextCycle(RULES, self.nodes, [])
        self.cycle = JobCycle(RULES, decision(size=last), map(node, "abcd"[:last])) if last else None
        if self.cycle is not None:
            self.cycle.outcome = outcome

    def until_s(self, ready: int, now_s: float, phase: m.NodePhase = m.NodePhase.READY) -> float:
        """Until when these wait; the last one of the nodes may be in another phase."""
        for place, name in enumerate("abcd"[:ready]):
            each = self.nodes[name] = node(name)
            each.link = each.place = place
            each.phase = phase if place == ready - 1 else m.NodePhase.READY
        return self.machine.meet(self.cycle, now_s).until_s


def test_round_is_complete_by_size_and_time() -> None:
    first = Meeting()
    assert first.until_s(2, 5.0) == first.until_s(3, 9.0) == 35.0  # others come some seconds apart in the first one
    first.nodes.clear()
    assert first.until_s(1, 9.0) == 9.0 + RULES.join_timeout_s
    assert first.until_s(2, 9.5) == 35.0  # whoever leaves meanwhile
    assert first.until_s(4, 10.0) <= 10.0
    assert Meeting(3).until_s(3, 7.0) == 7.0  # as many as before: a spare has the place of a lost one
    assert Meeting(3).until_s(2, 8.0) == 9.0
    assert Meeting(2).until_s(3, 8.0, m.NodePhase.ASIDE) == 8.0
    slow = Meeting(2)
    assert slow.until_s(3, 8.0, m.NodePhase.BUSY) == float("inf")
    assert slow.until_s(3, 9.0) == 9.0
    assert Meeting(2, Outcome.MEMBERSHIP).until_s(3, 8.0) == 9.0  # for newcomers, who seldom come alone


def test_round_with_too_few_nodes_waits_for_a_bounded_time() -> None:
    few = Meeting(3)
    assert few.until_s(1, 10.0) == few.until_s(2, 20.0, m.NodePhase.BUSY) == 10.0 + RULES.join_timeout_s


def seats(*states: NodeState, follows: int | None = None) -> list[Seat]:
    return [
        Seat(
            m.Report(0, state, Cause(text=f"text {place}", kind=CauseKind.CRASH, rank=place, follows=place == follows)),
            Node(f"i{place}", f"host{place}"),
        )
        for place, state in enumerate(states)
    ]


def judged(
    outcome: Outcome,
    *states: NodeState,
    rules: m.Rules = RULES,
    follows: int | None = None,
    found: Cause | None = None,
    nodes_left: int = 9,
    restarts: int = 0,
    advance: JobProgress = JobProgress(),  # noqa: B008 - frozen
    decided_by: int | None = None,
    **facts: Any,
) -> m.Verdict:
    cycle = JobCycle(rules, replace(decision(size=len(states)), restarts=restarts, advance=advance), [])
    cycle.seats, cycle.outcome = seats(*states, follows=follows), outcome
    cycle.judged = None if decided_by is None else (outcome, decided_by)
    for name, fact in facts.items():
        setattr(cycle, name, fact)
    if found is not None:
        cycle.failed(0, None, found)
    return cycle.verdict_on(nodes_left=nodes_left)


H, U, L, X, S = NodeState.HEALTHY, NodeState.UNHEALTHY, NodeState.LOST, NodeState.EXCLUDED, NodeState.SUCCEEDED


def test_the_cause_is_the_node_that_ended_the_cycle_or_whom_it_followed_from() -> None:
    assert judged(Outcome.FAILED, H, U, H, decided_by=1).node == 1
    verdict = judged(Outcome.FAILED, U, H, U, decided_by=0, follows=0)
    assert (verdict.node, verdict.cause.rank, verdict.decision.action) == (2, 2, Action.RESTART)
    assert judged(Outcome.FAILED, U, H, H, decided_by=0, follows=0).node == 0  # nobody tells more
    assert judged(Outcome.FAILED, U, L, H, decided_by=0, follows=0).node == 1
    assert judged(Outcome.FAILED, X, U, L, decided_by=1, follows=1).node == 2  # it costs a restart, and X doesn't
    assert judged(Outcome.FAILED, X, U, H, decided_by=1, follows=1).node == 0
    assert "only to the lost coordinator" in judged(Outcome.FAILED, H, H).cause.text
    assert "only to the lost coordinator" in judged(Outcome.FAILED, H, H, rules=HEALTHY_TWO).cause.text


def test_verdict_of_a_cycle_decides_action_and_exit_code() -> None:
    used_up = judged(Outcome.FAILED, U, H, decided_by=0, restarts=3)
    assert (used_up.decision.action, used_up.code) == (Action.GIVE_UP, 1)
    rules = m.Rules(min_nodes=1, max_nodes=2, max_restarts=9, max_stalled=3)
    stalled = judged(Outcome.FAILED, U, H, rules=rules, decided_by=0, advance=JobProgress(stalled=3))
    assert (stalled.decision.action, stalled.code) == (Action.GIVE_UP, 93)
    assert judged(Outcome.SUCCEEDED, S, S).code == 0
    assert judged(Outcome.MEMBERSHIP, X, H, nodes_left=1).decision.action is Action.GIVE_UP
    assert judged(Outcome.MEMBERSHIP, X, H, nodes_left=2).decision.action is Action.RESTART
    assert judged(Outcome.STOPPED, H, H, shutdown=(1, "enough")).decision.reason == "not restarting"


def told_to(verdict: m.Verdict, place: int | None) -> str:
    cause, decision = verdict.cause_for(place), verdict.decision
    return cycle_ended(
        cycle=verdict.cycle, cause=cause, decision=decision, outcome=verdict.outcome, max_restarts=RULES.max_restarts
    )


FINDING = Cause(kind=CauseKind.HANG, text="rank 9 (host1) hung", rank=9, iteration=4, detail="others wait")
HEALTHY_TWO = m.Rules(min_nodes=2, max_nodes=4, max_restarts=3, min_healthy=True)


@pytest.mark.parametrize(
    ("verdict", "elsewhere", "at_1"),
    [
        (
            judged(Outcome.FAILED, H, U, H, decided_by=1),
            "cycle 0 ended: node 1 (host1): text 1; restarting as cycle 1, 2 of 3 restarts left",
            "cycle 0 ended: text 1; restarting as cycle 1, 2 of 3 restarts left",
        ),
        (
            judged(Outcome.STOPPED, H, H, shutdown=(1, "enough")),
            "cycle 0 ended: node 1 (host1): enough; not restarting",
            "cycle 0 ended: enough; not restarting",
        ),
        # which rank it was is known across nodes, and what is listed says itself where
        (
            judged(Outcome.FAILED, H, U, decided_by=1, found=FINDING, restarts=3),
            "cycle 0 ended: rank 9 (host1) hung after iteration 4, others wait; no restarts left, giving up",
            None,
        ),
        (
            judged(Outcome.MEMBERSHIP, H, X, H, nodes_left=2),
            "cycle 0 ended: node 1 (host1) leaves the job: text 1; restarting as cycle 1, no restart used",
            None,
        ),
        (
            judged(Outcome.MEMBERSHIP, H, H, joining=2),
            "cycle 0 ended: 2 nodes waiting to join; restarting as cycle 1, no restart used",
            None,
        ),
        (
            judged(Outcome.FAILED, H, U, L, decided_by=1, rules=HEALTHY_TWO),
            "cycle 0 ended: 1 healthy node, at least 2 required: node 1 (host1) is unhealthy: text 1; "
            "node 2 (host2) is lost: text 2; restarting as cycle 1, 2 of 3 restarts left",
            None,
        ),
    ],
)
def test_a_node_hears_of_another_one_by_name_and_of_itself_without(
    verdict: m.Verdict, elsewhere: str, at_1: str | None
) -> None:
    assert {told_to(verdict, place) for place in (None, 0, 2)} == {elsewhere}
    assert told_to(verdict, 1) == (at_1 or elsewhere)
    assert MESSAGES_OF_BOTH.parse(arrived(verdict)) == verdict


def test_verdict_on_an_earlier_cycle_is_not_remembered_as_that_on_the_one_that_runs() -> None:
    machine = led(member())
    machine.heard(Assignment(decision(), 2, "store:1"), 0.0)
    restart = RestartDecision(action=Action.RESTART, restarts_left=1, reason="")
    for cycle, known in ((-1, None), (0, 0)):
        machine.heard(m.Verdict(decision().cycle + cycle, Outcome.FAILED, Cause(text="lost"), restart), 0.0)
        verdict = machine.standing.verdict
        assert (None if verdict is None else verdict.cycle - decision().cycle) == known


def test_a_launcher_is_more_patient_where_thousands_may_connect_at_once() -> None:
    for most, tries_again in ((4, True), (10_000, False)):
        who = m.Identity("job", m.Rules(min_nodes=2, max_nodes=most), "me", "host", "host", endpoint="first:1")
        machine = Member(who, now_s=0.0, chance=random.Random(1))
        machine.tick(0.0)
        machine.tick(1.5)
        again = machine.tick(2.5) + machine.tick(4.0)
        assert (actions.Connect("first:1") in again) is tries_again


HANG = hung(rank=3, local_rank=1, elapsed_s=3.0, timeout_s=3.0, at_ns=9)


def test_excluded_node_is_the_cause_only_if_no_missing_node_may_be() -> None:
    cycle = JobCycle(RULES, decision(size=3), map(node, "abc"))
    cycle.changed(2, m.Report(0, U, Cause(text="lost a peer", follows=True)))
    cycle.changed(1, m.Report(0, X, Cause(text="asked for it")))
    cycle.conclude(1.0, joining=0, awaits=True)
    cycle.judge(1.0, nodes_left=3, awaits=True)
    assert cycle.verdict is None
    cycle.lose(0, "no packet from its host")
    cycle.judge(1.0, nodes_left=3)
    verdict = cycle.verdict
    assert verdict is not None
    assert (verdict.node, verdict.cause.text) == (0, "no packet from its host")


MESSAGES_OF_BOTH: Vocabulary[Any] = Vocabulary(m.TO_LEADER | m.TO_MEMBER | HEARD_BY_PARTS | SAID_BY_PARTS)


@pytest.mark.parametrize("message", [{"type": "nothing"}, {"type": "assignment", "decision": [1]}])
def test_malformed_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        MESSAGES_OF_BOTH.parse(arrived(message))


def test_launcher_tells_the_next_coordinator_what_it_has_saved_kept_and_restored() -> None:
    machine, decided = led(member()), decision()
    machine.heard(Assignment(decided, 0), 1.0)
    seven, eight, nine = (SnapshotKey(0, 0, iteration) for iteration in (7, 8, 9))
    for each in (seven, eight, nine):
        assert machine.tell(Saved(each), 1.0) == [actions.Transmit(Saved(each))]
    machine.tell(Restored(0, seven), 1.0)
    assert machine.heard(Settled(seven, seven), 1.0) == [Settled(seven, seven)]
    machine.heard(Settled(eight, seven), 1.0)
    machine.heard(Settled(SnapshotKey(1, 0, 9), None), 1.0)
    status = machine.standing.parts.get(SnapshotStatus)
    assert status is not None
    assert (status.complete, status.saved, status.restored) == (seven, (nine,), Restored(0, seven))
    stock = Kept((KeptSnapshot(seven, 4, (0,)),), 1)
    machine.tell(m.Ready(Parts(stock)), 1.0)
    assert machine.standing.parts.get(Kept) is None, "while its ranks run"
    machine.heard(m.End(0, Outcome.FAILED, restarts=True), 1.0)
    assert machine.tell(m.Ready(), 1.0) == [actions.OpenStore()]
    machine.tell(m.Ready(Parts(stock)), 1.0)
    assert machine.store_opened("here:1", 1.0) == [actions.Transmit(m.Ready(machine.standing.parts, "here:1"))]
    assert (machine.standing.parts.get(Kept), machine.standing.store) == (stock, "here:1")
    assert actions.OpenStore() in machine.broken(1.0), "a decision on its way may have given it to others' ranks"
    assert machine.standing.phase is m.NodePhase.BUSY
    machine.store_opened("here:2", 1.0)
    assert (machine.standing.phase, machine.standing.store) == (m.NodePhase.READY, "here:2")
    machine.heard(Assignment(replace(decided, number=1, id="c9", cycle=1), 0), 1.0)
    assert machine.standing == m.NodeStatus(phase=m.NodePhase.RUNNING, cycle=1)


def test_coordinator_that_takes_over_goes_on_counting_what_nodes_have_saved() -> None:
    decided = decision(size=2)
    record = DecisionRecord(decided, "s", ("a", "b"), ("a", "b"))
    machine = Coordinator("d", m.JobDefinition("job", RULES), record=record, parts=LEADER_PARTS)
    seven, eight = SnapshotKey(0, 0, 7), SnapshotKey(0, 0, 8)
    standings = {
        "a": m.NodeStatus(m.NodePhase.RUNNING, 0, parts=Parts(SnapshotStatus(0, complete=seven, saved=(eight,)))),
        "b": m.NodeStatus(m.NodePhase.RUNNING, 0, parts=Parts(SnapshotStatus(0, saved=(seven,)))),
    }
    effects = []
    for link, (name, standing) in enumerate(standings.items()):
        held = Assignment(decided, link)
        hello = m.Hello("job", RULES, name, name, owns=link == 0, decided=held, standing=standing)
        effects += machine.heard(link, hello, 0.0)
    effects += answers(machine, machine.settle(0.0))
    effects += machine.heard(1, Saved(eight), 0.0)
    told = [each.message for each in effects if isinstance(each, actions.Send) and isinstance(each.message, Settled)]
    first, second = Settled(seven, seven), Settled(eight, eight)
    assert told in ([first, second], [first, first, second])
