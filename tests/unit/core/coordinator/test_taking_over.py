"""A coordinator takes over a job in the middle: what it works out anew, and what thousands of launchers may cost it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.coordinator.job_cycle import JobCycle
from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.facts.launcher import Cause
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.job import actions
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import (
    AcceptedProposal,
    AcceptorState,
    Assignment,
    CoordinatorHost,
    Decision,
    DecisionKind,
)
from megatron_ft.core.job.restart_policy import Action, JobProgress, Outcome, Reached, RestartDecision
from tests.support.job_machines import RULES, decision, led, links, member

LAST = Decision(0, (0, "old", 1), DecisionKind.CYCLE, 0, 5, 5, 0, names=("h0", "h1", "h2", "h3", "h4"))


def hello(place: int | None, rules: m.Rules, name: str = "", **standing: Any) -> m.Hello:
    """Of a launcher that had that place in ``LAST``, or of one that waits on standby."""
    if place is None:
        return m.Hello("job", rules, name, 1, name, standing=m.NodeStatus(m.NodePhase.READY))
    memory, stands = (
        AcceptorState((0, "old"), Assignment(LAST, place, True)),
        m.NodeStatus(m.NodePhase.RUNNING, 0, **standing),
    )
    return m.Hello("job", rules, f"i{place}", 2, f"h{place}", memory=memory, standing=stands)


def taken_over(hellos: list[m.Hello]) -> tuple[Coordinator, list[actions.CoordinatorEffect]]:
    """It leads these launchers, each at the link that is its number in the list; and what it has sent since."""
    machine, sent = Coordinator("c", founds=False, now_s=0.0), []
    for link, each in enumerate(hellos):
        machine.handle(actions.Heard(link, each), 0.0)
    machine.settle(0.0)
    for link in range(len(hellos)):
        sent += machine.handle(actions.Heard(link, m.Follow((1, "c"))), 0.0)
    sent += machine.settle(0.0)
    assert machine.leads
    return machine, sent


def until(machine: Coordinator, to_s: float, *, alive: Sequence[int], from_s: float = 0.0) -> list[actions.Send]:
    """Let time pass, in which these launchers answer and send their beats; what they were sent."""
    sent: list[actions.Send] = []
    now_s = from_s
    while now_s < to_s:
        now_s = min(to_s, now_s + 0.5)
        effects = [effect for link in alive for effect in machine.handle(actions.Heard(link, m.Beat()), now_s)]
        effects += machine.settle(now_s)
        for each in sends(effects):
            sent.append(each)
            for link in each.links:
                if isinstance(each.message, m.Lead):
                    effects += machine.handle(actions.Heard(link, m.Follow(each.message.term)), now_s)
                elif isinstance(each.message, m.Propose):
                    machine.handle(actions.Heard(link, m.Accept(each.message.ballot, "store:1")), now_s)
    return sent


def proposed(sent: Sequence[actions.Send], kind: DecisionKind) -> dict[int, m.Propose]:
    """Proposals of that kind, by link."""
    found = [(each.links, each.message) for each in sent if isinstance(each.message, m.Propose)]
    return {link: message for links, message in found if message.decision.kind is kind for link in links}


def sends(effects: Sequence[actions.CoordinatorEffect]) -> list[actions.Send]:
    return [each for each in effects if isinstance(each, actions.Send)]


def test_launcher_absent_after_a_takeover_is_not_awaited_if_none_restarts() -> None:
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3, launchers=5)
    machine, _ = taken_over([hello(place, rules) for place in (0, 1, 2, 4)])
    assert links(until(machine, 12.0, alive=range(4)), m.End) == [0, 1, 2, 3]  # longer than a silence
    for link in range(4):
        machine.handle(actions.Heard(link, m.Ready()), 12.0)
    assert not proposed(until(machine, 69.0, alive=range(4), from_s=12.0), DecisionKind.END)  # it may yet be back
    ends = proposed(until(machine, 71.0, alive=range(4), from_s=69.0), DecisionKind.END)
    (end,) = {each.decision for each in ends.values()}
    assert (end.kind, end.code) == (DecisionKind.END, 94)
    assert end.text == "4 nodes left, at least 5 required; lost launchers are not restarted: h3"


def test_the_launcher_on_the_host_of_a_lost_node_has_its_place_with_the_next_coordinator_too() -> None:
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3, last_call_s=0.1)
    machine, _ = taken_over([hello(place, rules) for place in (0, 3, 4)])
    for link, host in ((8, "h2"), (9, "h1")):
        machine.handle(actions.Heard(link, hello(None, rules, host)), 0.5)
    here = (0, 1, 2, 8, 9)
    until(machine, 10.0, alive=here, from_s=0.5)
    for link in range(3):
        machine.handle(actions.Heard(link, m.Ready()), 10.0)
    asked = proposed(until(machine, 12.0, alive=here, from_s=10.0), DecisionKind.CYCLE)
    assert {link: each.place for link, each in asked.items()} == {0: 0, 9: 1, 8: 2, 1: 3, 2: 4}


def test_cycle_without_progress_counts_though_its_node_is_lost_with_the_coordinator_that_judged_it() -> None:
    rules = m.Rules(min_nodes=4, max_nodes=5, max_restarts=3, launchers=5, last_call_s=0.1)
    verdict = m.Verdict(
        0,
        Outcome.FAILED,
        Cause(text="rank 0 exited with code 7"),
        RestartDecision(action=Action.RESTART, restarts_left=2, reason=""),
        node=0,
        nodes=5,
        reached=Reached(0, 7),
    )
    known = replace(LAST, advance=JobProgress(0, 7))
    hellos = [hello(place, rules, ended=Outcome.FAILED, verdict=verdict) for place in range(1, 5)]
    machine, _ = taken_over(
        [
            replace(each, memory=AcceptorState((0, "old"), Assignment(known, place, True)))
            for place, each in enumerate(hellos, start=1)
        ]
    )
    for link in range(4):
        machine.handle(actions.Heard(link, m.Ready()), 0.0)
    begun = proposed(until(machine, 30.0, alive=range(4)), DecisionKind.CYCLE)
    assert {each.decision.advance.stalled for each in begun.values()} == {1}


def test_end_of_a_cycle_is_computed_once_for_launchers_that_come_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[m.End] = []
    end = JobCycle.end
    monkeypatch.setattr(JobCycle, "end", lambda cycle, **more: made.append(end(cycle, **more)) or made[-1])
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)
    has_ended = hello(0, rules, ended=Outcome.FAILED)
    _, sent = taken_over([has_ended, *(hello(place, rules) for place in range(1, 5))])
    assert sorted(links(sent, m.End)) == [0, 1, 2, 3, 4]
    assert len(made) <= 2  # before and after it leads


def test_hang_that_many_nodes_detect_is_looked_into_once() -> None:
    def nobody_looks() -> Iterator[Node]:
        raise AssertionError("all nodes were looked at once more")
        yield

    cycle, nodes = JobCycle(RULES, decision(size=2)), []
    for place in (0, 1):
        node = Node.of(m.Hello("job", RULES, f"i{place}", 1, f"h{place}"), place)
        node.place, node.link = place, 10 + place
        cycle.occupied(place, node.instance, node.name)
        nodes.append(node)
    hang = m.Hang(
        0,
        RankHung(
            cycle=0,
            since_ns=0,
            rank=1,
            local_rank=0,
            kind="section",
            section="step",
            elapsed_s=3.0,
            timeout_s=2.0,
            iteration=7,
            at_ns=0,
        ),
    )
    assert cycle.hang(1, hang, nodes, 0.0) == [10, 11]
    assert cycle.hang(0, hang, nobody_looks(), 0.1) == []
    assert cycle.hang(0, replace(hang, passive=True), nobody_looks(), 0.2) == []


def test_another_job_at_a_later_endpoint_ends_no_launcher_that_looks_for_its_own() -> None:
    refused = m.Dismiss(m.REFUSED, "another job already uses this rendezvous endpoint")
    machine = member()
    machine.tick(0.0)
    machine.failed(0.0)  # nothing listens at the first endpoint yet
    (connect,) = [effect for effect in machine.tick(0.3) if isinstance(effect, actions.Connect)]
    assert connect.address != "first:1"
    machine.opened(0.3)
    assert not any(isinstance(effect, actions.Leave) for effect in machine.heard(refused, 0.3))
    # at the first endpoint it is the user's mistake
    first = member()
    first.tick(0.0)
    first.opened(0.0)
    assert actions.Leave(m.REFUSED, refused.text) in first.heard(refused, 0.0)
    # but not of a launcher that has had a part in the job
    part = led(member())
    part.heard(m.Commit(decision()), 0.0)
    assert not any(isinstance(effect, actions.Leave) for effect in part.heard(refused, 1.0))


def test_a_launcher_whose_coordinator_has_lost_its_lead_tries_the_others_next() -> None:
    """It had stood still, and most nodes have another one by now: it is not to be asked again and again."""
    machine = led(member())
    machine.heard(m.Commit(decision(), candidates=("third:1",)), 0.0)
    for tenth in range(1, 20):
        machine.heard(m.Beat(), tenth / 10)
    machine.heard(m.Wait(1, 4, soon=True), 2.0)
    tried = []
    for tenth in range(20, 75):
        for effect in machine.tick(tenth / 10):
            if isinstance(effect, actions.Connect):
                tried.append(effect.address)
                machine.failed(tenth / 10)
    assert tried[0] == "third:1"


def test_late_launchers_get_the_coordinator_candidates_in_the_same_order() -> None:
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)

    def at(place: int | None, name: str = "") -> m.Hello:
        return replace(hello(place, rules, name), address=f"h{place}:1")

    machine, _ = taken_over([at(place) for place in (4, 2, 3)])
    candidates = []
    for link, each in enumerate([at(None, "s0"), at(0), at(None, "s1")], start=3):
        machine.handle(actions.Heard(link, each), 0.0)
        machine.settle(0.0)
        news = machine.handle(actions.Heard(link, m.Follow((1, "c"))), 0.0) + machine.settle(0.0)
        candidates += [
            effect.message.candidates
            for effect in news
            if isinstance(effect, actions.Send) and isinstance(effect.message, m.Commit) and link in effect.links
        ]
    assert candidates == [("h2:1", "h3:1", "h4:1")] * 2


def test_launcher_alone_at_a_coordinator_is_told_not_to_wait_long() -> None:
    last, rules = replace(LAST, world=4, size=4, names=("h0", "h1", "h2", "h3")), m.Rules(min_nodes=4, max_nodes=4)
    machine = Coordinator("c", founds=False, now_s=0.0)
    for place, soon in ((1, False), (2, True)):
        memory, stands = AcceptorState((0, "old"), Assignment(last, place, True)), m.NodeStatus(m.NodePhase.RUNNING, 0)
        said = m.Hello("job", rules, f"i{place}", 2, f"h{place}", memory=memory, standing=stands)
        machine.handle(actions.Heard(place, said), 0.0)
        assert actions.Send([place], m.Wait(place, 4, soon)) in machine.settle(0.0)


def test_the_candidates_of_an_older_decision_are_forgotten_with_it() -> None:
    """A coordinator that led hears of another one's decision: those of the last cycle may be gone."""
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)
    machine, _ = taken_over([replace(hello(place, rules), address=f"old{place}:1") for place in (2, 3, 4)])
    newer = replace(LAST, number=1, value=(1, "d", 1), cycle=1)
    stands = m.NodeStatus(m.NodePhase.RUNNING, 1)
    for link in (10, 11, 12):
        memory = AcceptorState((1, "d"), Assignment(newer, link - 10, True))
        said = m.Hello("job", rules, f"n{link}", 1, f"n{link}", f"new{link}:1", memory=memory, standing=stands)
        machine.handle(actions.Heard(link, said), 0.0)
    machine.handle(actions.Heard(13, hello(None, rules, "s")), 0.0)
    machine.settle(0.0)
    news = machine.handle(actions.Heard(13, m.Follow((2, "c"))), 0.0) + machine.settle(0.0)
    assert not machine.leads
    (commit,) = [each.message for each in news if isinstance(each, actions.Send) and isinstance(each.message, m.Commit)]
    assert commit.candidates == ("new10:1", "new11:1", "new12:1")


@pytest.mark.parametrize("named", [True, False])
def test_the_first_decision_is_not_made_again_without_most_of_its_nodes(named: bool) -> None:
    """Its launcher was stopped between the proposal and the decision, and the others have trained and ended since."""
    rules = m.Rules(min_nodes=2, max_nodes=5, max_restarts=3)
    first = replace(LAST, voters=tuple(f"i{place}" for place in range(5)) if named else ())

    def at(place: int) -> m.Hello:
        memory = AcceptorState((0, "old"), None, AcceptedProposal((0, "old", 1), Assignment(first, place, True)))
        return m.Hello("job", rules, f"i{place}", 2, f"h{place}", owns=place == 0, memory=memory)

    machine, sent = Coordinator("c", founds=True, now_s=0.0), []
    for link, place in enumerate((0, 3, 4)):
        machine.handle(actions.Heard(link, at(place)), 0.0)
        sent.append(machine.settle(0.0))
    assert [links(each, m.Wait) for each in sent[:2]] == [[0], [1]]
    assert sorted(links(sent[2], m.Lead)) == [0, 1, 2]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("old", ["a", "old"])  # a lesser term than its own, and a greater one
def test_possible_decision_of_a_predecessor_is_proposed_before_an_own_one(
    order: tuple[int, ...], late: bool, old: str
) -> None:
    """The first launcher is a new one, and leads as soon as it follows; the others have accepted, and follow later."""
    rules = m.Rules(min_nodes=2, max_nodes=5, max_restarts=3)
    first = replace(LAST, value=(0, old, 1), voters=tuple(f"i{place}" for place in range(5)))
    machine = Coordinator("c", founds=True, now_s=0.0)

    def follow(link: int, accepted: AcceptedProposal | None, term: tuple[int, str]) -> None:
        machine.handle(actions.Heard(link, m.Follow(term, accepted)), 0.0)
        sent.extend(machine.settle(0.0))

    machine.handle(actions.Heard(0, m.Hello("job", rules, "new", 1, "h0", owns=True)), 0.0)
    sent = machine.settle(0.0)
    if late:  # it leads before any other is there
        follow(0, None, (0, "c"))
        assert machine.leads
    held = {link: AcceptedProposal((0, old, 1), Assignment(first, link, True)) for link in (1, 2, 3)}
    for link, accepted in held.items():
        memory = AcceptorState((0, old), None, accepted)
        machine.handle(actions.Heard(link, m.Hello("job", rules, f"i{link}", 2, f"h{link}", memory=memory)), 0.0)
    sent += machine.settle(0.0)
    term = [each.message.term for each in sent if isinstance(each, actions.Send) and isinstance(each.message, m.Lead)][
        -1
    ]
    for link in order:
        follow(link, held.get(link), term)
    values = {
        each.message.decision.value
        for each in sent
        if isinstance(each, actions.Send) and isinstance(each.message, m.Propose)
    }
    assert values == {first.value}


def test_a_launcher_of_none_of_its_nodes_does_not_count_for_the_first_decision() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=5, max_restarts=3)
    first = replace(LAST, voters=tuple(f"i{place}" for place in range(5)))
    memory = AcceptorState((0, "old"), None, AcceptedProposal((0, "old", 1), Assignment(first, 0, True)))
    machine = Coordinator("c", founds=True, now_s=0.0)
    machine.handle(actions.Heard(0, m.Hello("job", rules, "i0", 2, "h0", owns=True, memory=memory)), 0.0)
    for link in (1, 2, 3):
        machine.handle(actions.Heard(link, m.Hello("job", rules, f"new{link}", 1, f"new{link}")), 0.0)
    sent = machine.settle(0.0)
    assert not links(sent, m.Lead)
    assert sorted(links(sent, m.Wait)) == [0, 1, 2, 3]


def waits(effects: Sequence[actions.CoordinatorEffect]) -> dict[int, m.Wait]:
    """What launchers are told that wait, by link."""
    sent = [each for each in effects if isinstance(each, actions.Send) and isinstance(each.message, m.Wait)]
    return {link: each.message for each in sent for link in each.links if isinstance(each.message, m.Wait)}


def visited(machine: Coordinator, place: int, now_s: float, *, leaves: bool = True) -> dict[int, m.Wait]:
    """A launcher comes, and goes on to the next address; what those are told that are here."""
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)
    machine.handle(actions.Heard(place, hello(place, rules)), now_s)
    told = waits(machine.settle(now_s))
    if leaves:
        machine.handle(actions.Broken(place), now_s)
        machine.settle(now_s)
    return told


def test_launchers_are_told_to_wait_where_enough_came_within_ten_seconds() -> None:
    """Else launchers that search alone may miss each other for a long time, if each is needed."""
    machine = Coordinator("c", founds=False, now_s=0.0)
    assert not visited(machine, 1, 0.0)[1].gathers
    assert not visited(machine, 2, 1.0, leaves=False)[2].gathers
    told = visited(machine, 3, 1.9)
    assert {link: wait.gathers for link, wait in told.items()} == {2: True, 3: True}
    machine.handle(actions.Broken(2), 1.9)
    for second in range(3, 12):
        machine.settle(float(second))
    assert not visited(machine, 4, 12.0)[4].gathers


def test_launchers_that_wait_are_told_where_the_one_on_this_host_has_found_a_coordinator() -> None:
    machine = Coordinator("c", founds=False, elsewhere="there:1", now_s=0.0)
    assert visited(machine, 1, 0.0, leaves=False)[1].elsewhere == "there:1"
    assert not waits(machine.settle(0.2))
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)
    machine.handle(actions.Heard(4, replace(hello(4, rules), owns=True)), 0.3)  # it has lost that coordinator again
    assert waits(machine.settle(0.3))[4].elsewhere == ""


def test_launchers_that_came_before_another_lead_was_known_no_longer_count_as_searching() -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for place in (1, 2):
        visited(machine, place, 0.0)
    machine.handle(actions.Heard(9, m.Moved("job", "there:1", LAST.value, 0, 1.0)), 1.0)
    machine.settle(1.0)
    assert visited(machine, 3, 1.5, leaves=False)[3].elsewhere == "there:1"
    machine.settle(20.0)  # what it was told doesn't hold any more
    assert not visited(machine, 4, 2.0)[4].gathers


def test_why_the_last_cycle_ended_is_said_by_one_that_is_here_while_the_next_one_is_agreed_on() -> None:
    rules = m.Rules(min_nodes=4, max_nodes=5, max_restarts=3)
    decided = RestartDecision(action=Action.RESTART, restarts_left=2, reason="")
    verdict = m.Verdict(0, Outcome.FAILED, Cause(text="its launcher exited"), decided, node=0, nodes=5)
    following = Decision(1, (0, "old", 2), DecisionKind.CYCLE, 1, 4, 4, 0, restarts=1)
    machine = Coordinator("c", founds=False, now_s=0.0)
    for place in range(1, 5):  # that of the first one is lost, which this coordinator isn't sure of yet
        said = hello(place, rules, ended=Outcome.FAILED, verdict=verdict)
        machine.handle(actions.Heard(place, said), 0.0)
    sent = machine.settle(0.0)
    for place in range(1, 5):
        accepted = AcceptedProposal((0, "old", 2), Assignment(following, place - 1, True))
        sent += machine.handle(actions.Heard(place, m.Follow((1, "c"), accepted)), 0.0)
    sent += machine.settle(0.0)
    assert [each.decision.value for each in proposed(sends(sent), DecisionKind.CYCLE).values()] == [(0, "old", 2)] * 4
    assert links(sent, m.PrintJobLines) == [1]


def test_launcher_that_has_missed_the_cycle_is_asked_to_print_its_lines_once_it_has_heard_of_it() -> None:
    rules = m.Rules(min_nodes=5, max_nodes=5, max_restarts=3)
    silent = CoordinatorHost(0, "h0")
    machine, sent = taken_over([replace(hello(place, rules), found_silent=silent) for place in (2, 3, 4)])
    assert not links(sent, m.PrintJobLines)  # the first that isn't lost isn't here yet
    memory = AcceptorState((0, "old"), None, AcceptedProposal((0, "old", 1), Assignment(LAST, 1, True)))
    late = m.Hello("job", rules, "i1", 1, "h1", memory=memory, standing=m.NodeStatus(m.NodePhase.READY))
    sent = machine.handle(actions.Heard(9, late), 0.1) + machine.settle(0.1)
    sent += machine.handle(actions.Heard(9, m.Follow((1, "c"), memory.accepted)), 0.2) + machine.settle(0.2)
    told = [type(each.message) for each in sends(sent) if 9 in each.links]
    assert told.index(m.Commit) < told.index(m.PrintJobLines)
    assert told.count(m.PrintJobLines) == 1
