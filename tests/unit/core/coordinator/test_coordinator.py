"""What a coordinator concludes when launchers and other coordinators come, go, and stand still."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.facts.launcher import Cause, CauseKind, NodeLost
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.job import actions, job_lines
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import (
    AcceptedProposal,
    AcceptorState,
    Assignment,
    CoordinatorHost,
    Decision,
    DecisionKind,
)
from megatron_ft.core.job.hang_diagnosis import HangDiagnosis
from megatron_ft.core.job.restart_policy import NodeState, Outcome
from tests.support.job_machines import answers, begun, decision, led, links, member
from tests.support.machines import Job


def test_the_node_of_a_launcher_whose_own_coordinator_outlives_it_is_lost_at_once() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    for breaks_first in (False, True):
        machine = Coordinator("c", founds=True, now_s=0.0)
        for link, name in enumerate("abc"):
            machine.handle(actions.Heard(link, m.Hello("job", rules, name, 1, name, owns=name == "a")), 0.0)
            machine.handle(actions.Heard(link, m.Ready()), 0.0)
        begun = answers(machine, machine.settle(0.0))
        assert any(isinstance(effect, actions.Decided) for effect in begun)
        if breaks_first:
            machine.handle(actions.Broken(0), 0.0)
            assert not any(isinstance(effect, actions.Judged) for effect in machine.settle(0.0))  # it may come back
        machine.orphaned()
        effects = machine.settle(0.0)
        assert (actions.Drop(0) in effects) is not breaks_first
        (verdict,) = [effect.verdict for effect in effects if isinstance(effect, actions.Judged)]
        assert (verdict.node, "its launcher exited" in verdict.cause.text) == (0, True)
        (lost,) = [each for each in effects if isinstance(each, actions.Send) and isinstance(each.message, NodeLost)]
        assert (lost.links, lost.message.node, "its launcher exited" in lost.message.text) == ([1], "a", True)
        assert links(machine.settle(0.1), NodeLost) == []


def test_node_that_was_asked_to_leave_is_not_told_as_lost() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    for failed in (False, True):
        machine = Coordinator("c", founds=True, now_s=0.0)
        for link, name in enumerate("abc"):
            machine.handle(actions.Heard(link, m.Hello("job", rules, name, 1, name, owns=name == "a")), 0.0)
            machine.handle(actions.Heard(link, m.Ready()), 0.0)
        answers(machine, machine.settle(0.0))
        machine.handle(actions.Heard(2, m.Goodbye("received SIGTERM", failed=failed)), 1.0)
        assert links(machine.settle(1.0), NodeLost) == ([0] if failed else [])


def test_a_node_whose_answer_came_too_late_has_the_place_that_it_has_accepted() -> None:
    rules = m.Rules(min_nodes=3, max_nodes=3, max_restarts=3)
    machine, launchers = Coordinator("c", founds=True, now_s=0.0), {}

    def say(link: int, message: m.FromMember) -> list[actions.CoordinatorEffect]:
        return machine.handle(actions.Heard(link, message), 0.0)

    def follow(*followers: int) -> None:
        for link in followers:
            accepted = launchers[link].memory.accepted
            for effect in say(link, m.Follow((0, "c"), accepted)):
                assert isinstance(effect, actions.Send)
                launchers[link].heard(effect.message, 0.0)

    for link, name in enumerate("abc"):
        launchers[link] = led(member(), (0, "c"))
        say(link, m.Hello("job", rules, name, 1, name, owns=name == "a"))
        say(link, m.Ready())
    machine.settle(0.0)
    follow(0, 1, 2)
    for effect in machine.settle(0.0):
        if isinstance(effect, actions.Send):
            (link,) = effect.links
            assert isinstance(effect.message, m.Propose)
            launchers[link].heard(effect.message, 0.0)
    assert [each.memory.accepted is not None for each in launchers.values()] == [True] * 3
    # the connection of the node that founds the job breaks, and no answer is there yet: nobody leads for a moment
    machine.handle(actions.Broken(0), 0.0)
    machine.settle(0.0)
    launchers[3] = launchers.pop(0)
    say(3, m.Hello("job", rules, "a", 2, "a", owns=True, memory=launchers[3].memory))
    assert links(machine.settle(0.0), m.Lead) == [1, 2, 3]
    follow(3, 1)
    proposed = machine.settle(0.0)
    assert links(proposed, m.Propose) == [1, 3]
    begun = answers(machine, proposed)
    assert [effect.held.decision.number for effect in begun if isinstance(effect, actions.Decided)] == [0]
    follow(2)
    assert launchers[2].place is not None
    machine.settle(0.0)
    (lost,) = [
        effect.message
        for effect in answers(machine, machine.handle(actions.Broken(2), 1.0) + machine.settle(1.4))
        if isinstance(effect, actions.Send) and isinstance(effect.message, m.Verdict)
    ]
    assert (lost.node, "its launcher exited" in lost.cause.text) == (launchers[2].place, True)


def is_judged(machine: Coordinator, now_s: float) -> bool:
    return any(isinstance(effect, actions.Judged) for effect in machine.settle(now_s))


def test_launcher_that_left_a_paused_coordinator_has_time_to_find_it_again() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    for stood_still_s, comes_back, judged_s in ((0.0, False, 0.5), (30.0, False, 13.5), (30.0, True, None)):
        machine = begun(rules, "abc")
        machine.settle(stood_still_s)
        machine.handle(actions.Broken(1), stood_still_s)
        if comes_back:
            machine.handle(actions.Heard(7, m.Hello("job", rules, "b", 2, "b")), stood_still_s + 0.2)
        found = None
        for tenth in range(1, 160):
            for link in (0, 7, 2):
                machine.handle(actions.Heard(link, m.Beat()), stood_still_s + tenth / 10)
            if is_judged(machine, stood_still_s + tenth / 10):
                found = found or tenth / 10
        assert (found and round(found, 1)) == (judged_s and pytest.approx(judged_s, abs=0.3))


def test_node_whose_kernel_connection_was_given_up_is_lost_only_once_it_was_silent_for_long_enough() -> None:
    """Packets to the node were lost, and its own came: it may be back at once."""
    machine = begun(m.Rules(min_nodes=2, max_nodes=3, max_restarts=3), "abc")
    judged = []
    for tenth in range(1, 160):
        for link in range(3):
            if link != 1 or tenth <= 90:
                machine.handle(actions.Heard(link, m.Beat()), tenth / 10)
        if tenth == 100:
            machine.handle(actions.Broken(1, silent=True), 10.0)
        judged += [(tenth, each.verdict) for each in machine.settle(tenth / 10) if isinstance(each, actions.Judged)]
    ((tenth, verdict),) = judged
    assert (tenth, verdict.node, verdict.cause.text) == (145, 1, "no message from its launcher for 5.5 s")


def test_exclusion_of_a_node_costs_no_restart_where_its_goodbye_went_to_another_coordinator() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    machine, excluded = begun(rules, "abc"), m.Report(0, NodeState.EXCLUDED, Cause(text="rank 1 asked for it"))
    leaver = m.Identity("job", rules, "b", "b", "b", ()).excluded()
    machine.handle(actions.Broken(1, reset=True), 0.1)
    machine.handle(actions.Heard(0, m.Report(0, NodeState.UNHEALTHY, Cause(text="lost a peer", follows=True))), 0.1)
    standing = m.NodeStatus(m.NodePhase.EXCLUDED, report=excluded)
    hello = leaver.hello(1, owns=False, memory=AcceptorState(), standing=standing, found_silent=None, now_s=0.1)
    machine.handle(actions.Heard(7, hello), 0.1)
    (verdict,) = [each.verdict for each in machine.settle(0.1) if isinstance(each, actions.Judged)]
    assert verdict.cause.text == "node 1 (b) leaves the job: rank 1 asked for it"
    assert (verdict.outcome, verdict.decision.restarts_left) == (Outcome.MEMBERSHIP, 3)


def test_excluded_launcher_keeps_the_reason_for_a_coordinator_that_has_not_heard_it() -> None:
    machine = led(member(), (0, "c"))
    report = m.Report(0, NodeState.EXCLUDED, Cause(text="rank 1 asked for it"))
    for message in (report, m.Goodbye("rank 1 asked for it", excluded=True)):
        machine.tell(message, 0.0)
    machine.heard(m.Stay(), 0.1)
    assert (machine.identity.instance, machine.standing.report) == (member().identity.excluded().instance, report)


@pytest.mark.parametrize("reset", [False, True])  # it is, where an answer comes after the launcher has closed it
def test_launcher_that_gave_up_waiting_for_an_answer_is_awaited_as_long_as_one_that_never_came(reset: bool) -> None:
    for says_hello, lost_s in ((False, 11.5), (True, 13.5)):  # 2 s later
        machine = Coordinator("c", founds=False, now_s=0.0)
        for link in range(4):
            answers(machine, machine.handle(actions.Heard(link, hello_again(link)), 0.0) + machine.settle(0.0))
        if says_hello:
            machine.handle(actions.Heard(4, hello_again(4)), 0.0)
            machine.settle(0.0)
        judged_s = []
        for tenth in range(1, 140):
            if tenth == 20 and says_hello:
                machine.handle(actions.Broken(4, reset=reset), 2.0)
            for link in range(4):
                machine.handle(actions.Heard(link, m.Beat()), tenth / 10)
            judged_s += [tenth / 10] if is_judged(machine, tenth / 10) else []
        assert judged_s == [pytest.approx(lost_s, abs=0.15)]


def test_a_coordinator_that_has_lost_its_job_to_another_sends_fresh_launchers_there() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    machine = begun(rules, "abc")
    fresh = m.Hello("job", rules, "new", 1, "new")
    assert machine.handle(actions.Heard(7, m.Moved("job", "there:1")), 1.0) == [actions.Drop(7)]  # it leads
    assert machine.handle(actions.Heard(8, fresh), 1.0) == []
    for link in range(3):
        machine.handle(actions.Broken(link, silent=True), 2.0)
    machine.settle(2.0)
    assert not machine.leads
    assert machine.handle(actions.Heard(9, m.Moved("job", "there:1")), 3.0) == [actions.Drop(9)]
    (told,) = machine.settle(3.0)
    assert told == actions.Send([8], m.Wait(0, 3, soon=False, elsewhere="there:1"))
    machine.handle(actions.Heard(10, replace(fresh, instance="newer")), 4.0)
    assert machine.settle(4.0) == [actions.Send([10], m.Wait(0, 3, soon=False, elsewhere="there:1", age_s=1.0))]


def test_leader_that_missed_decisions_gives_up_its_lead_and_names_the_other_coordinator() -> None:
    machine = begun(m.Rules(min_nodes=2, max_nodes=3, max_restarts=3), "abc")
    decision = machine._consensus.decision
    assert decision is not None
    for number, leads in ((decision.number, True), (decision.number + 1, False)):
        machine.handle(actions.Heard(7, m.Moved("job", "there:1", decision.founding, number)), 1.0)
        effects = machine.settle(1.0)
        assert machine.leads is leads
        told = [each.message for each in effects if isinstance(each, actions.Send) and isinstance(each.message, m.Wait)]
        assert [wait.elsewhere for wait in told] == ([] if leads else ["there:1"])


def test_leader_tells_a_coordinator_that_missed_decisions_where_it_is() -> None:
    machine = begun(m.Rules(min_nodes=2, max_nodes=3, max_restarts=3), "abc")
    decision = machine._consensus.decision
    assert decision is not None
    told = machine.handle(actions.Heard(7, m.Moved("job", "there:1", decision.founding, decision.number - 1)), 1.0)
    assert told == [actions.Drop(7), actions.Send([0], m.Rival("there:1"))]
    again = machine.handle(actions.Heard(8, m.Moved("job", "there:1", decision.founding, decision.number - 1)), 1.5)
    assert again == [actions.Drop(8)]
    assert machine.leads


def test_a_lost_node_that_hears_late_of_a_cycle_hears_that_it_is_lost_too() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3, min_healthy=True)
    last = Decision(0, (0, "old", 1), DecisionKind.CYCLE, 0, 3, 3, 0)
    machine = Coordinator("c", founds=False, now_s=0.0)

    def hello(name: str, place: int, *, knows: bool) -> m.Hello:
        held = Assignment(last, place, True)
        memory = AcceptorState(
            (0, "old"), held if knows else None, None if knows else AcceptedProposal((0, "old", 1), held)
        )
        phase = m.NodePhase.RUNNING if knows else m.NodePhase.READY
        return m.Hello("job", rules, name, 1, name, memory=memory, standing=m.NodeStatus(phase, 0 if knows else -1))

    for link, name in enumerate("ab"):
        machine.handle(actions.Heard(link, hello(name, link, knows=True)), 0.0)
    answers(machine, machine.settle(0.0))
    for tenth in range(1, 122):
        for link in range(2):
            machine.handle(actions.Heard(link, m.Beat()), tenth / 10)
        machine.settle(tenth / 10)
    machine.handle(actions.Heard(5, hello("c", 2, knows=False)), 12.1)
    machine.settle(12.1)
    told = machine.handle(
        actions.Heard(5, m.Follow((1, "c"), AcceptedProposal((0, "old", 1), Assignment(last, 2, True)))), 12.1
    )
    assert links(told, m.Commit) == [5]
    (end,) = [
        effect.message for effect in told if isinstance(effect, actions.Send) and isinstance(effect.message, m.End)
    ]
    assert (end.cycle, end.lost) == (0, True)


def test_launcher_that_misses_a_decision_searches_where_its_nodes_do() -> None:
    machine = led(member())
    machine.heard(m.Commit(decision(), candidates=("third:1",)), 0.0)
    machine.heard(m.Propose((1, "c", 2), decision(1, cycle=1), 2, True, ("fourth:1",)), 0.0)
    machine.broken(1.0)
    tried = []
    for tenth in range(10, 60):
        for effect in machine.tick(tenth / 10):
            if isinstance(effect, actions.Connect):
                tried.append(effect.address)
                machine.failed(tenth / 10)
    assert tried[:6] == ["first:1", "fourth:1", "first:1", "third:1", "first:1", "second:1"]  # it may come to nothing


LAST = Decision(0, (0, "old", 1), DecisionKind.CYCLE, 0, 5, 5, 0)


def hello_again(place: int, *, accepted: Decision | None = None, knows: bool = True) -> m.Hello:
    """Of a launcher that had that place in ``LAST``, to another coordinator."""
    held = Assignment(LAST, place, True)
    then = None if accepted is None else AcceptedProposal(accepted.value, Assignment(accepted, place, True))
    memory = AcceptorState((0, "old"), held if knows else None, then if knows else AcceptedProposal(LAST.value, held))
    standing = m.NodeStatus(m.NodePhase.RUNNING, 0) if knows else m.NodeStatus()
    rules = m.Rules(min_nodes=2, max_nodes=5, max_restarts=3)
    return m.Hello("job", rules, f"i{place}", 2, f"h{place}", memory=memory, standing=standing)


def follow(memory: AcceptorState) -> m.Follow:
    return m.Follow((1, "c"), memory.accepted)


def taking_over(*accepted: Decision | None) -> tuple[Coordinator, list[actions.CoordinatorEffect]]:
    """The next coordinator, to which launchers of ``LAST`` come that have accepted this, by place; and what it asks."""
    machine = Coordinator("c", founds=False, now_s=0.0)
    hellos = [hello_again(place, accepted=each) for place, each in enumerate(accepted)]
    for link, hello in enumerate(hellos):
        machine.handle(actions.Heard(link, hello), 0.0)
    machine.settle(0.0)
    for link, hello in enumerate(hellos):
        machine.handle(actions.Heard(link, follow(hello.memory)), 0.0)
    return machine, machine.settle(0.0)


def test_launcher_that_ends_is_not_counted_by_its_own_coordinator() -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in (0, 1):
        machine.handle(actions.Heard(link, hello_again(link)), 0.0)
    machine.handle(actions.Heard(4, replace(hello_again(4), owns=True)), 0.0)
    machine.handle(actions.Broken(4), 1.0)
    machine.settle(1.0)
    assert not machine.leads  # two of five
    machine.orphaned()
    answers(machine, machine.settle(1.0))
    assert machine.leads  # two of four, with the one at place 0


def test_launcher_kills_its_own_coordinators_before_it_votes_at_another() -> None:
    machine = member()
    machine.owns("host:1")
    machine.tick(0.0)
    machine.opened(0.0)
    told = machine.heard(m.Lead((1, "c")), 0.0)
    assert told[:2] == [actions.KillCoordinators("first:1"), actions.Transmit(m.Follow((1, "c")))]
    own = member()
    own.owns("first:1")
    assert [type(effect) for effect in led(own).heard(m.Lead((2, "c")), 0.0)] == [actions.Transmit]


def test_pending_decision_is_proposed_to_voters_that_come_later_too() -> None:
    roll = Decision(1, (0, "old", 2), DecisionKind.ROLL, 0, 5, 4, 0, began=(0, "old", 1))
    machine, asked = taking_over(roll, roll, roll)
    assert links(asked, m.Propose) == [0, 1, 2]
    machine.handle(actions.Heard(3, hello_again(3, accepted=roll)), 0.2)
    machine.settle(0.2)
    told = machine.handle(actions.Heard(3, follow(hello_again(3, accepted=roll).memory)), 0.2)
    assert links(told, m.Propose) == [3]


def test_launcher_not_asked_before_a_takeover_keeps_its_place_in_the_decision() -> None:
    old = Decision(1, (0, "old", 2), DecisionKind.CYCLE, 1, 5, 5, 0, voters=("i0", "i1", "i2", "i3", "i4"))
    machine, asked = taking_over(old, old, old, None)
    effects = [each for each in asked if isinstance(each, actions.Send)]
    proposed = {each.links[0]: each.message for each in effects if isinstance(each.message, m.Propose)}
    assert {link: (one.place, one.votes) for link, one in proposed.items()} == {
        place: (place, True) for place in range(4)
    }
    for link, propose in proposed.items():
        machine.handle(actions.Heard(link, m.Accept(propose.ballot, "store:1")), 0.1)
    decided = [each for each in machine.settle(0.1) if isinstance(each, actions.Decided)]
    assert [each.held.decision for each in decided] == [old]
    assert machine.leads  # four of its five voters are here


def test_pending_decision_does_not_wait_for_a_lost_node_0() -> None:
    old = Decision(1, (0, "old", 2), DecisionKind.CYCLE, 1, 5, 5, 0)
    machine, asked = taking_over(old, old, old, old, old)
    proposed = [each for each in asked if isinstance(each, actions.Send)]
    (ballot,) = {each.message.ballot for each in proposed if isinstance(each.message, m.Propose)}
    for link in range(1, 5):
        machine.handle(actions.Heard(link, m.Accept(ballot, "")), 0.1)
    assert not any(isinstance(effect, actions.Decided) for effect in machine.settle(0.1))
    machine.handle(actions.Broken(0), 0.2)
    decided = [each for at_s in (0.2, 60.0) for each in machine.settle(at_s) if isinstance(each, actions.Decided)]
    assert [each.held.decision for each in decided] == [old]


def test_launcher_that_missed_a_decision_hears_it_before_the_next_proposal() -> None:
    """What it has accepted last is all that it remembers: asked first, it forgot its place in the cycle."""
    roll = Decision(1, (0, "old", 2), DecisionKind.ROLL, 0, 5, 4, 0, began=(0, "old", 1))
    machine, asked = taking_over(roll, roll, roll)
    assert links(asked, m.Propose) == [0, 1, 2]
    late = hello_again(3, knows=False)
    machine.handle(actions.Heard(3, late), 0.2)
    machine.settle(0.2)
    told = machine.handle(actions.Heard(3, follow(late.memory)), 0.2)
    sent = [each.message for each in told if isinstance(each, actions.Send) and each.links == [3]]
    assert [type(message) for message in sent[:2]] == [m.Commit, m.Propose]
    launcher = member()
    launcher.heard(m.Lead((0, "old")), 0.0)
    launcher.heard(m.Propose((0, "old", 1), LAST, 3, True, ()), 0.0)
    begun = [
        effect for message in sent[:2] for effect in launcher.heard(message, 0.3) if isinstance(effect, actions.Begin)
    ]
    assert [effect.held.place for effect in begun] == [3]


def test_the_vote_is_not_taken_of_a_node_that_has_connected_and_follows_the_next_moment() -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in range(4):
        machine.handle(actions.Heard(link, hello_again(link)), 0.0)
    answers(machine, machine.settle(0.0))
    late = hello_again(4, knows=False)
    machine.handle(actions.Heard(4, late), 0.1)
    effects = machine.settle(0.3)
    assert (links(effects, m.Lead), links(effects, m.Propose)) == ([4], [])
    assert links(machine.handle(actions.Heard(4, follow(late.memory)), 0.4), m.Commit) == [4]
    assert links(machine.settle(0.4), m.Propose) == []


@pytest.mark.parametrize("comes_s", [2.0, 20.0])
def test_only_a_lost_node_loses_its_vote_after_a_takeover(comes_s: float) -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in range(4):
        machine.handle(actions.Heard(link, hello_again(link)), 0.0)
    answers(machine, machine.settle(0.0))
    asked = []
    for tenth in range(120):
        now_s = tenth / 10
        effects = [each for link in range(4) for each in machine.handle(actions.Heard(link, m.Beat()), now_s)]
        if now_s == comes_s:
            machine.handle(actions.Heard(4, hello_again(4)), now_s)
        if now_s > comes_s:
            machine.handle(actions.Heard(4, m.Beat()), now_s)
        effects += machine.settle(now_s)
        asked += [(now_s, link) for link in links(effects, m.Propose)]
        answers(machine, effects)
    assert asked == ([] if comes_s < 11.5 else [(11.5, link) for link in range(4)])


@pytest.mark.parametrize(("told", "lost_s"), [(3, 0.0), (2, 11.5), (0, 11.5)])
def test_the_node_beside_a_coordinator_whose_host_most_have_found_silent_is_lost_at_once(
    told: int, lost_s: float
) -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in range(1, 5):
        hello = replace(hello_again(link), found_silent=CoordinatorHost(0, "there") if link <= told else None)
        machine.handle(actions.Heard(link, hello), 0.0)
    effects = answers(machine, machine.settle(0.0))
    judged: list[tuple[float, str, str]] = []
    for tenth in range(130):
        for link in range(1, 5):
            machine.handle(actions.Heard(link, m.Beat()), tenth / 10)
        effects += machine.settle(tenth / 10)
        judged += [
            (tenth / 10, each.verdict.cause.host, each.verdict.cause.text)
            for each in effects
            if isinstance(each, actions.Judged)
        ]
        effects = []
    assert judged == [(lost_s, "", job_lines.silent(11.5)) if lost_s else (lost_s, "there", job_lines.HOST_SILENT)]


@pytest.mark.parametrize("waits", [True, False])
def test_host_lost_with_the_coordinator_is_named_for_the_hang_it_causes(waits: bool) -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)

    def note(rank: int) -> m.RankSnapshots:
        state = "T" if rank == 3 and not waits else "S"
        return m.RankSnapshots(0, (RankSnapshot(rank=rank, state=state, has_stack=True, waits_in="all_reduce"),))

    def connect(link: int) -> list[actions.CoordinatorEffect]:
        hello = replace(hello_again(link), found_silent=CoordinatorHost(0, "there"))
        return machine.handle(actions.Heard(link, hello), 0.0) + machine.settle(0.0)

    verdict = RankHung(
        cycle=0,
        since_ns=0,
        rank=1,
        local_rank=0,
        kind="section",
        section="step",
        elapsed_s=5.0,
        timeout_s=5.0,
        iteration=7,
        at_ns=0,
    )
    connect(1)
    assert links(machine.handle(actions.Heard(1, m.Hang(0, verdict)), 0.0), m.DiagnoseHang) == [1]
    machine.handle(actions.Heard(1, note(1)), 0.0)
    effects = connect(2) + connect(3)
    assert links(effects, m.DiagnoseHang) == [2, 3]
    effects = answers(machine, effects)
    for link in (2, 3):
        machine.handle(actions.Heard(link, note(link)), 0.1)
    assert not any(isinstance(each, actions.Judged) for each in effects + machine.settle(0.1))
    assert links(connect(4), m.DiagnoseHang) == [4]
    machine.handle(actions.Heard(4, note(4)), 0.3)
    (judged,) = [each.verdict for each in machine.settle(0.3) if isinstance(each, actions.Judged)]
    if waits:
        assert (judged.node, judged.cause.host, judged.cause.text) == (0, "there", job_lines.HOST_SILENT)
    else:
        assert (judged.cause.rank, judged.cause.kind) == (3, CauseKind.HANG)


@pytest.mark.parametrize(
    ("gone_s", "lost_s", "text"), [(0.1, 5.6, job_lines.silent(5.6)), (1.0, 1.3, job_lines.LAUNCHER_ENDED)]
)
def test_launcher_that_gave_up_on_a_new_coordinator_is_silent_not_ended(
    gone_s: float, lost_s: float, text: str
) -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in range(5):
        machine.handle(actions.Heard(link, hello_again(link)), 0.0)
    effects = answers(machine, machine.settle(0.0))
    judged: list[tuple[float, str]] = []
    for tenth in range(80):
        if tenth == round(10 * gone_s):
            machine.handle(actions.Broken(4, silent=False), tenth / 10)
        for link in range(4):
            machine.handle(actions.Heard(link, m.Beat()), tenth / 10)
        effects += machine.settle(tenth / 10)
        judged += [(tenth / 10, each.verdict.cause.text) for each in effects if isinstance(each, actions.Judged)]
        effects = []
    assert judged == [(pytest.approx(lost_s, abs=0.11), text)]


def test_the_next_coordinator_knows_the_names_of_lost_nodes_that_it_has_never_met() -> None:
    job = Job(min_nodes=2, max_nodes=3)
    job.start("abc")
    made = job.decided[-1].held.decision
    assert made.names == ("a", "b", "c")
    machine = Coordinator("d", founds=False, now_s=0.0)
    for place in range(2):
        memory = AcceptorState((1, "c"), Assignment(made, place, votes=True))
        standing = m.NodeStatus(m.NodePhase.RUNNING, 0)
        hello = m.Hello("job", job.rules, f"i{place}", 2, made.names[place], memory=memory, standing=standing)
        machine.handle(actions.Heard(place, hello), 0.0)
    effects = answers(machine, machine.settle(0.0))
    for tenth in range(1, 130):
        for place in range(2):
            machine.handle(actions.Heard(place, m.Beat()), tenth / 10)
        effects += machine.settle(tenth / 10)
    (verdict,) = [effect.verdict for effect in effects if isinstance(effect, actions.Judged)]
    assert (verdict.node, verdict.cause.host, verdict.cause.text) == (2, "c", job_lines.silent(11.5))


@pytest.mark.parametrize(("nodes", "told"), [(100, 100), (101, 0)])
def test_decision_of_a_job_of_many_nodes_carries_no_names(nodes: int, told: int) -> None:
    job = Job(owner="\u0101", min_nodes=nodes, max_nodes=nodes)
    job.start("".join(map(chr, range(0x101, 0x101 + nodes))))
    assert len(job.decided[-1].held.decision.names) == told


def test_a_launcher_tells_the_next_coordinator_whose_host_answers_no_more() -> None:
    for silent, said in ((True, CoordinatorHost(3, "h3")), (False, None)):
        machine = led(member())
        machine.heard(m.Commit(decision(), beside=CoordinatorHost(3, "h3")), 0.0)
        machine.broken(1.0, silent=silent)
        (hello,) = [each.message for each in machine.opened(1.1) if isinstance(each, actions.Transmit)]
        assert isinstance(hello, m.Hello)
        assert hello.found_silent == said
        machine.heard(m.Lead((2, "d"), CoordinatorHost(1, "h1")), 1.2)
        machine.broken(1.3)
        (hello,) = [each.message for each in machine.opened(1.4) if isinstance(each, actions.Transmit)]
        assert isinstance(hello, m.Hello)
        assert hello.found_silent is None  # it has found another coordinator since


def test_a_coordinator_says_which_node_is_beside_it() -> None:
    machine = Coordinator("c", founds=False, now_s=0.0)
    for link in range(1, 5):
        machine.handle(actions.Heard(link, replace(hello_again(link), owns=link == 2)), 0.0)
    effects = machine.settle(0.0)
    assert [e.message.beside for e in effects if isinstance(e, actions.Send) and isinstance(e.message, m.Lead)] == [
        CoordinatorHost(2, "h2")
    ]


def test_a_node_has_told_what_it_has_seen_with_its_last_note() -> None:
    verdict = RankHung(
        cycle=0,
        since_ns=0,
        rank=0,
        local_rank=0,
        kind="section",
        section="step",
        elapsed_s=3.0,
        timeout_s=3.0,
        iteration=7,
        at_ns=9,
    )
    diagnosis = HangDiagnosis(verdict, None, 0, asked=[0, 1], now_s=0.0)
    diagnosis.told(0, [RankSnapshot(rank=0, state="T", has_stack=True)])
    diagnosis.told(1, [RankSnapshot(rank=1, state="S", has_stack=True, waits_in="all_reduce")], more=True)
    assert diagnosis.is_open(1.0)
    diagnosis.told(1, [RankSnapshot(rank=2, state="S", has_stack=True, waits_in="all_reduce")])
    assert not diagnosis.is_open(1.0)
    cause = diagnosis.cause(several=True)
    assert cause is not None
    assert (cause.rank, "2 others wait in all_reduce" in cause.detail) == (0, True)


def test_node_on_standby_that_may_have_a_vote_is_not_dismissed_when_all_voters_have_left() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)
    machine = begun(rules, "ab")
    following = Decision(1, (5, "other", 1), DecisionKind.CYCLE, 1, 2, 2, 0)
    accepted = AcceptedProposal((5, "other", 1), Assignment(following, 1, votes=True))
    for link, name, has_accepted in ((5, "c", accepted), (6, "d", None)):
        memory = AcceptorState(accepted=has_accepted)
        machine.handle(actions.Heard(link, m.Hello("job", rules, name, 1, name, memory=memory)), 0.0)
    for link in (0, 1):
        machine.handle(actions.Heard(link, m.Goodbye("its launcher received SIGTERM")), 0.1)
    assert links(machine.settle(0.1), m.Dismiss) == [6]
