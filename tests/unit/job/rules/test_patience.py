"""How long a launcher waits for a coordinator before it gives up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.member import CUT_OFF_S, TAKEN_S, Member
from megatron_ft.job.rules.restart_policy import Action, Outcome, RestartDecision
from megatron_ft.link.facts.launcher import Cause
from tests.support.job_machines import RULES, decision, led, member, unled


def _given_up(machine: Member, now_s: float) -> tuple[float, Any]:
    """When it leaves if no coordinator can be reached, and how."""
    return next((at_s, effect) for at_s, effect in unled(machine, now_s) if isinstance(effect, m.Dismiss))


@pytest.mark.parametrize(
    ("launchers", "in_etcd", "waits_s"),
    [
        (0, False, CUT_OFF_S + RULES.join_timeout_s),
        (4, False, CUT_OFF_S - 1.0),
        (4, True, CUT_OFF_S + RULES.join_timeout_s),
    ],
)
def test_launcher_whose_leader_is_lost_gives_up_as_its_ranks_end_only_where_none_is_started_again(
    launchers: int, in_etcd: bool, waits_s: float
) -> None:
    machine = member()
    machine.identity = replace(machine.identity, rules=replace(RULES, launchers=launchers))
    machine = led(machine)
    machine.heard(Assignment(decision(), 1), 1.0)
    machine.identity = replace(machine.identity, is_in_etcd=in_etcd)
    machine.broken(1.0)
    at_s, left = _given_up(machine, 1.0)
    assert waits_s + 1.0 <= at_s < waits_s + 2.5
    assert left.code == TRY_AGAIN_CODE
    assert "first:1: the connection was closed there" in left.text


def test_launcher_whose_ranks_train_gives_up_no_sooner_than_these_are_ended() -> None:
    machine = led(member(replace(RULES, launchers=4)))
    machine.heard(Assignment(decision(), 1), 0.0)
    machine.broken(0.0)
    assert next(at_s for at_s, each in unled(machine, 0.0, int) if isinstance(each, m.Dismiss)) >= 600.0


def test_launcher_that_gives_up_has_the_code_of_what_it_knows_of_the_end() -> None:
    machine = led(member())
    machine.heard(Assignment(decision(), 1), 0.0)
    machine.heard(m.End(5, Outcome.FAILED, False), 0.0)
    assert machine.standing.phase is m.NodePhase.RUNNING, "that was another cycle"
    machine.heard(m.End(0, Outcome.FAILED, False), 0.0)
    stops = RestartDecision(action=Action.GIVE_UP, restarts_left=0, reason="")
    machine.heard(m.Verdict(0, Outcome.FAILED, Cause(text="exited"), stops, node=0, nodes=4, code=93), 0.0)
    assert machine.heard(Assignment(decision(), 1), 0.0) == []  # again
    machine.broken(0.0)
    assert _given_up(machine, 0.0)[1].code == 93


def test_launcher_of_an_excluded_node_says_so_to_each_leader_and_ends_well() -> None:
    machine = led(member())
    goodbye = m.Goodbye("rank 1 asked for it", excluded=True)
    machine.tell(goodbye, 0.0)
    assert machine.heard(Assignment(decision(), 1), 0.0) == []  # it has crossed the goodbye
    machine.broken(0.1)
    assert actions.Transmit(goodbye) in machine.opened(0.2)
    machine.heard(m.Stay(), 0.2)
    assert _given_up(machine, 0.2)[1].code == 0


def test_endpoint_at_which_no_process_was_ever_reached_is_a_mistake_after_the_join_timeout() -> None:
    at_s, left = _given_up(member(has_known_host=False), 0.0)
    assert RULES.join_timeout_s <= at_s < RULES.join_timeout_s + 1.0
    assert left.code == 2
    assert left.text.startswith(f"no coordinator was reached at first:1 for {RULES.join_timeout_s:g} s (--rdzv-conf")
    assert left.text.endswith("start a launcher there, or set --rdzv-conf is_host=1 on one node")


def test_endpoint_at_which_a_process_was_reached_once_is_no_mistake() -> None:
    machine = member()
    machine.tick(0.0)
    machine.opened(0.1)
    machine.broken(0.2)
    assert _given_up(machine, 0.3)[1].code == TRY_AGAIN_CODE


@pytest.mark.parametrize("changes", ["nothing", "owns", "was led", "was reached"])
def test_port_of_the_endpoint_that_another_program_has_is_a_mistake_soon(changes: str) -> None:
    machine = member()
    machine.identity = replace(machine.identity, is_here=True)
    if changes == "was led":
        led(machine).heard(m.ANSWER, 0.5)
        machine.broken(1.0)
    if changes == "was reached":  # by a leader of the last run, say, which tells its end to others
        machine.tick(0.0)
        machine.opened(0.5)
        machine.broken(0.5)
    machine.owns = changes == "owns"
    seen = [*unled(machine, 1.0)]
    at_s, left = next((at_s, each) for at_s, each in seen if isinstance(each, m.Dismiss))
    if changes != "nothing":
        assert at_s > RULES.join_timeout_s
        return
    assert TAKEN_S <= at_s < TAKEN_S + 2.5
    assert left.code == 2
    assert left.text == (
        "another program has the port of the rendezvous endpoint first:1 on this machine: end it "
        "(`ss -ltnp sport = :1` shows it), or choose another port"
    )
    assert not any(isinstance(each, m.Tell) for _, each in seen[: seen.index((at_s, left))])


def test_a_launcher_that_finds_no_coordinator_at_the_start_tells_why_soon_and_at_the_end() -> None:
    machine = member()
    seen = [*unled(machine, 0.0, problem="no route")]
    ((said_s, line),) = [(at_s, each.text) for at_s, each in seen if isinstance(each, m.Tell)]
    timeout = f"{RULES.join_timeout_s:g} s (--rdzv-conf join_timeout)"
    assert 10.0 <= said_s < 11.0
    problems = "first:1: no route"
    assert line == f"no coordinator reached ({problems}); trying for {timeout}"
    assert [each for _, each in seen if isinstance(each, m.Dismiss)] == [
        m.Dismiss(TRY_AGAIN_CODE, f"no coordinator reached for {timeout} ({problems})")
    ]


@pytest.mark.parametrize(("is_named", "has_trained", "code"), [(False, False, 2), (True, False, 0), (False, True, 0)])
def test_launcher_that_never_trained_does_not_exit_with_0_for_a_job_that_may_be_another(
    is_named: bool, has_trained: bool, code: int
) -> None:
    trained = m.NodeStatus(cycle=0 if has_trained else -1)
    finished = replace(decision(1, DecisionKind.END, size=2), code=0)

    def left(end: Decision, standing: m.NodeStatus = trained) -> m.Dismiss:
        machine = member(is_named=is_named)
        machine.standing = standing
        (effect,) = machine.heard(Assignment(end), 0.0)
        assert isinstance(effect, m.Dismiss)
        return effect

    told = left(finished)
    assert (told.code, told.is_of_all) == (code, code == 0)
    assert ("--rdzv-id" in told.text) is (code == 2)
    assert left(replace(finished, code=1)).code == 1
    assert left(finished, m.NodeStatus(m.NodePhase.EXCLUDED)).code == 0
    assert left(replace(finished, world=0)).code == 0
