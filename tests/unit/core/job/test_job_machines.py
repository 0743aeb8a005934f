"""The control plane's parts, one by one; how they work together is `test_simulation`'s."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_ft.coordinator.service import frame
from megatron_ft.core.agent.lines import cycle_ended
from megatron_ft.core.diagnosis.exits import Cause, CauseKind, HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankNote
from megatron_ft.core.errors import ConfigError, ProtocolError
from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.coordinator import Coordinator
from megatron_ft.core.job.forming import Forming
from megatron_ft.core.job.lobby import Node, choose
from megatron_ft.core.job.member import CUT_OFF_S, Identity, Member
from megatron_ft.core.job.progress import Advance, Reached
from megatron_ft.core.job.restart_policy import Action, NodeState, Outcome
from megatron_ft.core.job.restart_policy import Decision as Follows
from megatron_ft.core.job.roll import Accepted, Decision, Held, Kind, Memory, is_quorum
from megatron_ft.core.job.search import Search
from megatron_ft.core.job.verdict import Seat, verdict_on
from megatron_ft.core.messages.codec import Vocabulary, pack
from megatron_ft.ipc.net.secret import Asked, Asking, read_secret
from megatron_ft.ipc.wire import encode

RULES = m.Rules(min_nodes=2, max_nodes=4, max_restarts=3)


def decision(number: int = 0, kind: Kind = Kind.CYCLE, *, cycle: int = 0, size: int = 4, head: int = 0) -> Decision:
    return Decision(number, (number, "c", 1), kind, cycle, size, size, head)


@pytest.mark.parametrize(
    ("here", "size", "left", "enough"),
    [
        ({0, 1, 2}, 5, (), True),
        ({3, 4}, 5, (), False),
        ({0, 3}, 4, (), True),  # exactly half of them, with the head
        ({1, 2, 3}, 4, (), True),
        ({2, 3}, 4, (), False),
        ({1}, 2, (), False),
        ({1}, 2, (0,), True),  # the head has said farewell
        ({1, 2}, 5, (3, 4), True),
        (set(), 0, (), False),
    ],
)
def test_how_many_must_agree(here: set[int], size: int, left: tuple[int, ...], enough: bool) -> None:
    assert is_quorum(here, decision(size=size), left) is enough


def test_any_two_quorums_have_a_voter_in_common_whoever_has_left() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        size = chance.randint(1, 7)
        everybody = set(range(size))
        gone = {place for place in everybody if chance.random() < 0.3}
        known = [{place for place in gone if chance.random() < 0.5} for _ in range(2)]
        # those that have left vote for nobody, whether a coordinator has heard of it or not
        voters = [{place for place in everybody - gone if chance.random() < 0.6} for _ in range(2)]
        both = [is_quorum(voters[i], decision(size=size), known[i]) for i in range(2)]
        assert not all(both) or voters[0] & voters[1]


def node(name: str, rank: int | None = None, arrived: int = 0) -> Node:
    return Node(name, f"host-{name}", "", rank, owns=False, arrived=arrived)


def names(nodes: list[Node]) -> str:
    return "".join(each.instance for each in nodes)


def test_the_first_places_are_by_rank_then_by_arrival() -> None:
    ready = [node("c", None, 3), node("b", None, 2), node("a", 1, 4), node("d", 0, 5)]
    assert names(choose([], ready, 9)[0]) == "dabc"
    assert names(choose([], ready, 3)[0]) == "dab"


def test_the_first_place_by_arrival_is_that_of_the_node_that_hosts_the_coordinator() -> None:
    host = Node("h", "host-h", "", None, owns=True, arrived=9)
    first = [node("a", None, 1), node("b", None, 2), host]
    chosen, slots = choose([], first, 9)
    assert names(chosen) == "hab"
    assert names(choose([], first, 2)[0]) == "ha"
    assert names(choose([], [node("a", 0, 1), node("b", 1, 2), host], 9)[0]) == "abh"
    ranked = Node("h", "host-h", "", 2, owns=True, arrived=9)
    assert names(choose([], [node("a", 0, 1), node("b", 1, 2), ranked], 9)[0]) == "abh"
    # later, who coordinates has no advantage
    taken = Node("t", "host-t", "", None, owns=True, arrived=30)
    assert names(choose(slots, [first[0], host, node("s", None, 20), taken], 3)[0]) == "has"


def test_everybody_keeps_its_place_a_spare_fills_the_gap_and_who_comes_back_has_its_own() -> None:
    first = [node(name, None, index) for index, name in enumerate("abcd")]
    chosen, slots = choose([], first, 4)
    without_b = [first[0], first[2], first[3]]
    assert names(choose(slots, [*without_b, node("s", None, 9)], 4)[0]) == "ascd"
    assert names(choose(slots, without_b, 4)[0]) == "acd"  # nobody is there for it
    _, later = choose(slots, without_b, 4)
    again = Node("B", "host-b", "", None, owns=False, arrived=20)  # a new launcher on the same host
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
    fresh = [Node(f"s{index}", Compared(f"s{index}"), "", None, False, 900 + index) for index in range(300)]
    back = Node("back", "host-n599", "", None, owns=False, arrived=2000)
    chosen, _ = choose(slots, [*first[:299], *fresh, back], 600)
    assert [each.instance for each in chosen[298:301]] == ["n298", "s0", "s1"]
    assert chosen[599] is back
    assert Compared.count < 3000


def complete(forming: Forming, ready: int, *, last: int, now_s: float, **more: Any) -> bool:
    values = {"awaited": 0, "patient": False, "arrivals": 0, **more}
    return forming.is_complete(RULES, ready=ready, last=last, now_s=now_s, **values)


def test_when_a_round_is_complete() -> None:
    forming = Forming()
    assert not complete(forming, 1, last=0, now_s=0.0)
    assert not complete(forming, 2, last=0, now_s=5.0)
    assert forming.alarm_s == 35.0  # others come some seconds apart in the first one
    assert complete(forming, 4, last=0, now_s=6.0)
    assert complete(forming, 3, last=3, now_s=7.0)  # as many as before: a spare has the place of a lost one
    assert not complete(Forming(), 2, last=3, now_s=8.0)
    assert not complete(Forming(), 3, last=3, now_s=8.0, awaited=1)
    late = Forming()
    assert [complete(late, 2, last=3, now_s=now_s) for now_s in (0.0, 0.5, 1.0)] == [False, False, True]
    assert not complete(Forming(), 3, last=2, now_s=0.0, patient=True)  # for newcomers, who seldom come alone


def test_too_few_nodes_are_waited_for_in_bounded_time() -> None:
    forming = Forming()
    assert not complete(forming, 1, last=3, now_s=10.0)
    assert not forming.has_waited_long(RULES, 609.9)
    assert forming.has_waited_long(RULES, 610.0)


def seats(*states: NodeState, follows: int | None = None) -> list[Seat]:
    return [
        Seat(m.Report(0, state, f"text {place}", CauseKind.CRASH, place, follows=place == follows), f"host{place}")
        for place, state in enumerate(states)
    ]


def judged(outcome: Outcome, *states: NodeState, rules: m.Rules = RULES, **more: Any) -> m.Verdict:
    values = {"restarts": 0, "stalled": 0, "decided_by": None, "found": None, "shutdown": None}
    follows = more.pop("follows", None)
    values.update({"nodes_left": 9, "joining": "", "cycle": 0, **more})
    return verdict_on(rules, seats(*states, follows=follows), outcome, **values)


H, U, L, X, S = NodeState.HEALTHY, NodeState.UNHEALTHY, NodeState.LOST, NodeState.EXCLUDED, NodeState.SUCCEEDED


def test_the_cause_is_the_node_that_ended_the_cycle_or_whom_it_followed_from() -> None:
    assert judged(Outcome.FAILED, H, U, H, decided_by=1).node == 1
    verdict = judged(Outcome.FAILED, U, H, U, decided_by=0, follows=0)
    assert (verdict.node, verdict.rank, verdict.action) == (2, 2, Action.RESTART)
    assert judged(Outcome.FAILED, U, H, H, decided_by=0, follows=0).node == 0  # nobody tells more
    assert judged(Outcome.FAILED, U, L, H, decided_by=0, follows=0).node == 1
    assert "only the lost coordinator" in judged(Outcome.FAILED, H, H).text


def test_what_follows() -> None:
    used_up = judged(Outcome.FAILED, U, H, decided_by=0, restarts=3)
    assert (used_up.action, used_up.code) == (Action.GIVE_UP, 1)
    rules = m.Rules(min_nodes=1, max_nodes=2, max_restarts=9, max_stalled=3)
    stalled = judged(Outcome.FAILED, U, H, rules=rules, decided_by=0, stalled=3)
    assert (stalled.action, stalled.code) == (Action.GIVE_UP, 93)
    assert judged(Outcome.SUCCEEDED, S, S).code == 0
    assert judged(Outcome.MEMBERSHIP, X, H, nodes_left=1).action is Action.GIVE_UP
    assert judged(Outcome.MEMBERSHIP, X, H, nodes_left=2).action is Action.RESTART
    assert judged(Outcome.STOPPED, H, H, shutdown=(1, "enough")).decision().reason == "not restarting"


def told_to(verdict: m.Verdict, place: int | None) -> str:
    cause, decision = verdict.cause(place), verdict.decision()
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
            "cycle 0 ended: on node 1 (host1) enough; not restarting",
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
            judged(Outcome.MEMBERSHIP, H, H, joining="2 nodes waiting to join"),
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
    assert MESSAGES_OF_BOTH.parse(pack(verdict)) == verdict


def test_where_there_is_one_node_it_has_no_name() -> None:
    assert told_to(judged(Outcome.FAILED, U, decided_by=0), None).startswith("cycle 0 ended: text 0; restarting")


def test_no_progress_is_told_as_such() -> None:
    rules = m.Rules(min_nodes=1, max_nodes=2, max_restarts=9, max_stalled=2)
    decision = judged(Outcome.FAILED, U, H, rules=rules, decided_by=0, stalled=2).decision()
    assert decision == Follows(
        action=Action.GIVE_UP, restarts_left=8, reason="no progress in 2 cycles, giving up", no_progress=True
    )


def member(**more: Any) -> Member:
    who = Identity("job", RULES, "me", "host", "host:1", ("first:1", "second:1"), **more)
    return Member(who, now_s=0.0, chance=random.Random(1))


def led(machine: Member, term: tuple[int, str] = (1, "c")) -> Member:
    machine.tick(0.0)
    machine.opened(0.0)
    machine.heard(m.Lead(term), 0.0)
    return machine


def test_a_launcher_follows_nobody_with_a_lesser_term_and_accepts_nothing_of_it() -> None:
    machine = led(member(), (5, "c"))
    assert machine.heard(m.Lead((4, "z")), 0.0) == [edge.Transmit(m.Newer((5, "c")))]
    assert machine.heard(m.Propose((4, "z", 1), decision(), 1, True), 0.0) == []
    assert machine.memory.accepted is None
    (accept,) = machine.heard(m.Propose((5, "c", 1), decision(), 1, True), 0.0)
    assert accept == edge.Transmit(m.Accept((5, "c", 1)))


def test_a_cycle_begins_with_the_decision_and_only_for_who_has_a_place() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 2, True), 0.0)
    (begin,) = machine.heard(m.Commit(decision(), "store:1"), 0.0)
    assert begin == edge.Begin(Held(decision(), 2, votes=True, store="store:1"))
    assert machine.heard(m.Commit(decision(), "store:1"), 0.0) == []  # again: it runs already
    assert led(member()).heard(m.Commit(decision(), "store:1"), 0.0) == []


def test_a_node_that_missed_a_decision_about_its_cycle_keeps_its_place_and_has_no_vote() -> None:
    memory = Memory(decided=Held(decision(), 2, votes=True, store="s"))
    held = memory.held(decision(1, Kind.ROLL))
    assert held is not None
    assert (held.place, held.votes, held.store) == (2, False, "s")
    assert memory.held(decision(1, Kind.CYCLE, cycle=1)) is None


def test_ranks_train_on_without_a_coordinator_and_are_ended_when_others_must_be_taken_to_go_on() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 2, True), 0.0)
    machine.heard(m.Commit(decision()), 0.0)
    machine.broken(1.0)
    ended_s = None
    for tenth in range(10, 400):
        effects = machine.tick(tenth / 10)
        if any(isinstance(effect, edge.Connect) for effect in effects):
            effects += machine.failed(tenth / 10)
        if any(isinstance(effect, edge.EndRanks) for effect in effects):
            ended_s = tenth / 10
            break
    assert ended_s is not None
    assert CUT_OFF_S <= ended_s <= CUT_OFF_S + 10


def test_the_next_coordinator_hears_that_the_others_had_given_this_node_up() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 2, True), 0.0)
    machine.heard(m.Commit(decision()), 0.0)
    (effect,) = machine.heard(m.End(0, Outcome.MEMBERSHIP, True, lost=True, text="silent"), 1.0)
    assert isinstance(effect, edge.EndRanks)
    machine.tell(m.Ready(), 1.0)
    assert machine.standing.report == m.Report(0, NodeState.UNHEALTHY, "silent", follows=True)


def test_a_launcher_is_more_patient_where_thousands_may_connect_at_once() -> None:
    for most, tries_again in ((4, True), (10_000, False)):
        who = Identity("job", m.Rules(min_nodes=2, max_nodes=most), "me", "host", "host:1", ("first:1",))
        machine = Member(who, now_s=0.0, chance=random.Random(1))
        machine.tick(0.0)
        machine.opened(0.5)
        machine.tick(1.5)
        effects = machine.tick(3.0)
        assert (edge.Disconnect() in effects) is tries_again


def test_time_in_which_a_launcher_stood_still_is_nobodys_silence() -> None:
    machine = led(member())
    assert machine.tick(100.0)[-1:] == [edge.Transmit(m.Beat())]
    assert machine.is_led


HANG = HangVerdict(
    rank=3, local_rank=1, kind="section", section="step", elapsed_s=3.0, timeout_s=3.0, iteration=7, at_ns=9
)
MESSAGES_OF_BOTH: Vocabulary[Any] = Vocabulary(m.FromMember | m.ToMember)
MESSAGES = [
    m.Hello(
        job="j",
        rules=RULES,
        instance="i",
        session=3,
        name="n",
        rank=0,
        memory=Memory((3, "c"), Held(decision(), 1, True), Accepted((3, "c", 2), Held(decision(1), 0, True, "s"))),
        standing=m.Standing(m.Phase.RUNNING, 4, m.Report(4, U, "x", CauseKind.HANG, 3, True, Reached(1, 2))),
    ),
    m.Hang(2, HANG, Reached(0, 3)),
    m.Notes(2, (RankNote(rank=1, state="T"),)),
    m.Propose((1, "c", 1), Decision(3, (1, "c", 1), Kind.END, 2, 4, 3, 1, 2, Advance(1, 2, 0), 93, "no"), None, False),
    m.End(2, Outcome.MEMBERSHIP, restarts=True, lost=True),
    m.Beat(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_is_what_arrives(message: Any) -> None:
    assert MESSAGES_OF_BOTH.parse(pack(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nothing"},
        {"type": "follow"},
        {"type": "follow", "term": [1]},
        {"type": "follow", "term": ["1", "c"]},
        {"type": "end", "cycle": True, "outcome": "failed", "restarts": True},
        {"type": "end", "cycle": 1, "outcome": "exploded", "restarts": True},
        {"type": "notes", "cycle": 1, "notes": {}},
        {"type": ["hello"]},
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        MESSAGES_OF_BOTH.parse(message)


def answers(machine: Coordinator, effects: list[edge.CoordinatorEffect]) -> list[edge.CoordinatorEffect]:
    """Take part as launchers do, until there is nothing to say; what was asked for at last."""
    while True:
        said: list[edge.Heard] = []
        for effect in effects:
            if isinstance(effect, edge.Send) and isinstance(effect.message, m.Lead):
                said += [edge.Heard(link, m.Follow(effect.message.term)) for link in effect.links]
            elif isinstance(effect, edge.Send) and isinstance(effect.message, m.Propose):
                said += [edge.Heard(link, m.Accept(effect.message.ballot, "store:1")) for link in effect.links]
        if not said:
            return effects
        effects = [effect for event in said for effect in machine.handle(event, 0.0)] + machine.settle(0.0)


def test_the_node_of_a_launcher_whose_own_coordinator_outlives_it_is_lost_at_once() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    for breaks_first in (False, True):
        machine = Coordinator("c", founds=True, now_s=0.0)
        for link, name in enumerate("abc"):
            machine.handle(edge.Heard(link, m.Hello("job", rules, name, 1, name, owns=name == "a")), 0.0)
            machine.handle(edge.Heard(link, m.Ready()), 0.0)
        begun = answers(machine, machine.settle(0.0))
        assert any(isinstance(effect, edge.Decided) for effect in begun)
        if breaks_first:
            machine.handle(edge.Broken(0), 0.0)
            assert not any(isinstance(effect, edge.Judged) for effect in machine.settle(0.0))  # it may come back
        machine.orphaned()
        effects = machine.settle(0.0)
        assert (edge.Drop(0) in effects) is not breaks_first
        (verdict,) = [effect.verdict for effect in effects if isinstance(effect, edge.Judged)]
        assert (verdict.node, "its launcher exited" in verdict.text) == (0, True)


def links(effects: list[edge.CoordinatorEffect], kind: type) -> list[int]:
    """Who is sent such a message."""
    sent = [effect for effect in effects if isinstance(effect, edge.Send) and isinstance(effect.message, kind)]
    return sorted(link for effect in sent for link in effect.links)


def test_a_node_whose_answer_came_too_late_has_the_place_that_it_has_accepted() -> None:
    rules = m.Rules(min_nodes=3, max_nodes=3, max_restarts=3)
    machine, launchers = Coordinator("c", founds=True, now_s=0.0), {}

    def say(link: int, message: m.FromMember) -> list[edge.CoordinatorEffect]:
        return machine.handle(edge.Heard(link, message), 0.0)

    def follow(*followers: int) -> None:
        for link in followers:
            accepted = launchers[link].memory.accepted
            for effect in say(link, m.Follow((0, "c"), accepted)):
                assert isinstance(effect, edge.Send)
                launchers[link].heard(effect.message, 0.0)

    for link, name in enumerate("abc"):
        launchers[link] = led(member(), (0, "c"))
        say(link, m.Hello("job", rules, name, 1, name, owns=name == "a"))
        say(link, m.Ready())
    machine.settle(0.0)
    follow(0, 1, 2)
    for effect in machine.settle(0.0):
        if isinstance(effect, edge.Send):
            (link,) = effect.links
            assert isinstance(effect.message, m.Propose)
            launchers[link].heard(effect.message, 0.0)
    assert [each.memory.accepted is not None for each in launchers.values()] == [True] * 3
    # the connection of the node that founds the job breaks, and no answer is there yet: nobody leads for a moment
    machine.handle(edge.Broken(0), 0.0)
    machine.settle(0.0)
    launchers[3] = launchers.pop(0)
    say(3, m.Hello("job", rules, "a", 2, "a", owns=True, memory=launchers[3].memory))
    assert links(machine.settle(0.0), m.Lead) == [1, 2, 3]
    follow(3, 1)
    proposed = machine.settle(0.0)
    assert links(proposed, m.Propose) == [1, 3]
    begun = answers(machine, proposed)
    assert [effect.held.decision.number for effect in begun if isinstance(effect, edge.Decided)] == [0]
    follow(2)
    assert launchers[2].place is not None
    machine.settle(0.0)
    (lost,) = [
        effect.message
        for effect in answers(machine, machine.handle(edge.Broken(2), 1.0) + machine.settle(1.4))
        if isinstance(effect, edge.Send) and isinstance(effect.message, m.Verdict)
    ]
    assert (lost.node, "its launcher exited" in lost.text) == (launchers[2].place, True)


def begun(rules: m.Rules, names: str) -> Coordinator:
    """Cycle 0 runs, on these nodes; the connection of each is its number."""
    machine = Coordinator("c", founds=True, now_s=0.0)
    for link, name in enumerate(names):
        machine.handle(edge.Heard(link, m.Hello("job", rules, name, 1, name, owns=link == 0)), 0.0)
        machine.handle(edge.Heard(link, m.Ready()), 0.0)
    assert any(isinstance(effect, edge.Decided) for effect in answers(machine, machine.settle(0.0)))
    return machine


def is_judged(machine: Coordinator, now_s: float) -> bool:
    return any(isinstance(effect, edge.Judged) for effect in machine.settle(now_s))


def test_who_has_left_a_coordinator_that_stood_still_is_waited_for_as_if_it_were_silent() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    for stood_still_s, comes_back, judged_s in ((0.0, False, 0.5), (30.0, False, 6.0), (30.0, True, None)):
        machine = begun(rules, "abc")
        machine.settle(stood_still_s)
        machine.handle(edge.Broken(1), stood_still_s)
        if comes_back:
            machine.handle(edge.Heard(7, m.Hello("job", rules, "b", 2, "b")), stood_still_s + 0.2)
        found = None
        for tenth in range(1, 80):
            for link in (0, 7, 2):
                machine.handle(edge.Heard(link, m.Beat()), stood_still_s + tenth / 10)
            if is_judged(machine, stood_still_s + tenth / 10):
                found = found or tenth / 10
        assert (found and round(found, 1)) == (judged_s and pytest.approx(judged_s, abs=0.3))


def test_a_launcher_looks_again_where_the_job_was_led_after_each_other_address() -> None:
    search = Search(("a", "b", "c"), own="me")
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(6)] == ["a", "b", "a", "c", "a", "b"]
    assert search.next(knows_job=True, now_s=0.0) == "a"
    search.found()
    search.is_silent(10.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (10.0, 11.0, 13.0)] == ["b", "c", "a"]
    search.is_silent(13.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (13.0, 14.0, 18.0)] == ["b", "c", "a"]
    alone = Search(("a",), own="a")
    assert [alone.next(knows_job=False, now_s=0.0) for _ in range(2)] == ["a", "a"]
    alone.sent_to("b")
    assert [alone.next(knows_job=False, now_s=0.0) for _ in range(3)] == ["b", "a", "b"]


def test_where_a_coordinator_broke_off_it_is_looked_for_once_more_because_it_is_replaced() -> None:
    search = Search(("a", "b", "c"), own="me")
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(2)] == ["a", "b"]
    search.broke_off()
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(2)] == ["a", "b"]
    search.broke_off()
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(3)] == ["a", "c", "a"]


def test_a_coordinator_that_has_lost_its_job_to_another_sends_fresh_launchers_there() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    machine = begun(rules, "abc")
    fresh = m.Hello("job", rules, "new", 1, "new")
    assert machine.handle(edge.Heard(7, m.Moved("job", "there:1")), 1.0) == [edge.Drop(7)]  # it leads
    assert machine.handle(edge.Heard(8, fresh), 1.0) == []
    for link in range(3):
        machine.handle(edge.Broken(link, silent=True), 2.0)
    machine.settle(2.0)
    assert not machine.leads
    away = [edge.Send([8], m.Elsewhere("there:1")), edge.Drop(8)]
    assert machine.handle(edge.Heard(9, m.Moved("job", "there:1")), 3.0) == [edge.Drop(9), *away]
    assert machine.handle(edge.Heard(10, fresh), 4.0) == [edge.Send([10], m.Elsewhere("there:1")), edge.Drop(10)]


def test_a_lost_node_that_hears_late_of_a_cycle_hears_that_it_is_lost_too() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3, min_healthy=True)
    last = Decision(0, (0, "old", 1), Kind.CYCLE, 0, 3, 3, 0)
    machine = Coordinator("c", founds=False, now_s=0.0)

    def hello(name: str, place: int, *, knows: bool) -> m.Hello:
        held = Held(last, place, True)
        memory = Memory((0, "old"), held if knows else None, None if knows else Accepted((0, "old", 1), held))
        phase = m.Phase.RUNNING if knows else m.Phase.READY
        return m.Hello("job", rules, name, 1, name, memory=memory, standing=m.Standing(phase, 0 if knows else -1))

    for link, name in enumerate("ab"):
        machine.handle(edge.Heard(link, hello(name, link, knows=True)), 0.0)
    answers(machine, machine.settle(0.0))
    for tenth in range(1, 62):
        for link in range(2):
            machine.handle(edge.Heard(link, m.Beat()), tenth / 10)
        machine.settle(tenth / 10)
    machine.handle(edge.Heard(5, hello("c", 2, knows=False)), 6.1)
    machine.settle(6.1)
    told = machine.handle(edge.Heard(5, m.Follow((1, "c"), Accepted((0, "old", 1), Held(last, 2, True)))), 6.1)
    assert links(told, m.Commit) == [5]
    (end,) = [effect.message for effect in told if isinstance(effect, edge.Send) and isinstance(effect.message, m.End)]
    assert (end.cycle, end.lost) == (0, True)


def test_who_misses_the_decision_on_a_cycle_looks_where_its_other_nodes_do() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 2, True, ("third:1", "fourth:1")), 0.0)
    machine.broken(1.0)
    tried = []
    for tenth in range(10, 40):
        for effect in machine.tick(tenth / 10):
            if isinstance(effect, edge.Connect):
                tried.append(effect.address)
                machine.failed(tenth / 10)
    assert tried[:4] == ["first:1", "third:1", "first:1", "fourth:1"]


def shake_hands(ours: bytes | None, theirs: bytes | None) -> bool:
    asking, asked = Asking(ours), Asked(theirs)
    message = asking.first()
    while message is not None:
        message = asked.answer(message)
        if message is not None:
            message = asking.answer(message)
    return asking.is_done and asked.is_done


def test_both_ends_know_the_secret_or_neither_goes_on() -> None:
    assert shake_hands(b"s" * 16, b"s" * 16)
    assert shake_hands(None, None)
    for theirs in (b"t" * 16, None):
        with pytest.raises(ProtocolError):
            shake_hands(b"s" * 16, theirs)


def test_the_secret_is_not_short_and_may_be_in_a_file(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    assert read_secret({"FT_SECRET_FILE": str(path)}) == b"0123456789abcdef"
    assert read_secret({}) is None
    for environ in ({"FT_SECRET": "short"}, {"FT_SECRET_FILE": str(tmp_path / "missing")}):
        with pytest.raises(ConfigError):
            read_secret(environ)


def test_a_proposal_whose_place_alone_is_written_anew_is_what_any_message_is() -> None:
    about = Decision(3, (2, "c", 1), Kind.END, 1, 4, 4, 0, text='says "place":7, and \\"place\\":8')
    for place in (0, 5, 9999, None):
        proposal = m.Propose((2, "c", 7), about, place, place is not None, ('host"place":1:29500', "b:1"))
        assert frame(proposal) == encode(proposal)
    assert frame(m.Beat()) == encode(m.Beat())
