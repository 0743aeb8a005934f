"""What a coordinator concludes when launchers and other coordinators come, go, and stand still."""

from __future__ import annotations

import pytest

from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import NodeState, Outcome
from megatron_ft.link.facts.launcher import Cause, NodeLost
from tests.support.job_machines import RULES, begun, led, links, member, sent


def test_node_that_was_asked_to_leave_is_not_told_as_lost() -> None:
    for failed in (False, True):
        machine = begun(RULES, "abc")
        machine.heard(2, m.Goodbye("received SIGTERM", failed=failed), 1.0)
        assert links(machine.settle(1.0), NodeLost) == ([0] if failed else [])


def test_launcher_that_connects_again_has_its_earlier_connection_closed() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)
    machine = begun(rules, "ab")
    hello = m.Hello("job", rules, "b", "b", "b", owns=False)
    assert actions.Drop(1) in machine.heard(7, hello, 0.1)


def test_exclusion_of_a_node_costs_no_restart_where_its_goodbye_went_to_another_coordinator() -> None:
    rules = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3)
    machine, excluded = begun(rules, "abc"), m.Report(0, NodeState.EXCLUDED, Cause(text="rank 1 asked for it"))
    machine.broken(1, 0.1, reset=True)
    machine.heard(0, m.Report(0, NodeState.UNHEALTHY, Cause(text="lost a peer", follows=True)), 0.1)
    standing = m.NodeStatus(m.NodePhase.EXCLUDED, report=excluded)
    hello = m.Hello("job", rules, "b", "b", "b", standing=standing)
    machine.heard(7, hello, 0.1)
    (verdict,) = sent(machine.settle(0.1), m.Verdict)
    assert verdict.cause.text == "node 1 (b) leaves the job: rank 1 asked for it"
    assert (verdict.outcome, verdict.decision.restarts_left) == (Outcome.MEMBERSHIP, 3)


@pytest.mark.parametrize("answered", [True, False])
def test_excluded_launcher_keeps_the_reason_for_a_coordinator_that_has_not_heard_it(answered: bool) -> None:
    machine = led(member())
    report = m.Report(0, NodeState.EXCLUDED, Cause(text="rank 1 asked for it"))
    for message in (report, m.Goodbye("rank 1 asked for it", excluded=True, code=0)):
        machine.tell(message, 0.0)
    effects = machine.heard(m.Stay(), 0.1) if answered else []
    for at_s in range(0 if answered else 40):
        effects += machine.tick(at_s)
    assert m.Stay() in effects
    assert (machine.standing.phase, machine.standing.report) == (m.NodePhase.EXCLUDED, report)
