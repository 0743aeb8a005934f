"""How long a launcher waits for a coordinator before it gives up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.core.job import actions, give_up_policy
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.coordinator_locator import NO_ANSWER
from megatron_ft.core.job.decisions import DecisionKind
from megatron_ft.core.job.give_up_policy import GIVE_UP_S
from megatron_ft.core.job.member import Member
from tests.support.job_machines import RULES, decision, led, member


def _given_up(machine: Member, now_s: float) -> tuple[float, Any]:
    """When it leaves if no coordinator can be reached, and how."""
    while True:
        effects = machine.tick(now_s)
        if any(isinstance(effect, actions.Connect) for effect in effects):
            effects += machine.failed(now_s)
        left = [effect for effect in effects if isinstance(effect, actions.Leave)]
        if left:
            return now_s, left[0]
        now_s = max(now_s, machine.alarm_s) + 0.001


def test_the_launcher_of_an_excluded_node_gives_up_when_those_of_the_job_have() -> None:
    machine = led(member())
    machine.tell(m.Goodbye("rank 0 asked for it", excluded=True), 1.0)
    machine.heard(m.Stay(), 1.0)
    at_s, left = _given_up(machine, 1.0)
    assert 1.0 + GIVE_UP_S <= at_s < 1.0 + GIVE_UP_S + 1.0
    assert (left.code, left.text) == (0, "no coordinator is reachable any more")


def test_a_launcher_that_has_had_no_part_in_the_job_yet_waits_for_the_join_timeout() -> None:
    at_s, left = _given_up(member(), 0.0)
    assert RULES.join_timeout_s <= at_s < RULES.join_timeout_s + 1.0
    assert left.code == RULES.try_again_code


def _unowned(*, has_known_host: bool = False) -> Member:
    machine = member()
    machine.identity = replace(machine.identity, has_known_host=has_known_host)
    return machine


def test_endpoint_at_which_no_process_was_ever_reached_is_a_mistake_after_the_join_timeout() -> None:
    at_s, left = _given_up(_unowned(), 0.0)
    assert RULES.join_timeout_s <= at_s < RULES.join_timeout_s + 1.0
    assert left.code == 2
    assert left.text.startswith(f"no process was reached at first:1 for {RULES.join_timeout_s:g} s (--rdzv-conf")
    assert left.text.endswith("start a launcher there, or set --rdzv-conf is_host=1 on one node")


def test_endpoint_on_a_host_of_the_job_is_no_mistake_where_no_process_was_reached() -> None:
    assert _given_up(_unowned(has_known_host=True), 0.0)[1].code == RULES.try_again_code


@pytest.mark.parametrize("how", ["closed", "waits", "unnamed"])
def test_endpoint_at_which_a_process_was_reached_once_is_no_mistake(how: str) -> None:
    machine = _unowned()
    machine.tick(0.0)
    if how == "closed":
        machine.broken(0.1)
    elif how == "unnamed":
        machine.failed(0.1, "the host name cannot be resolved", is_unowned=False)
    else:
        machine.opened(0.1)
        machine.broken(0.2)
    assert _given_up(machine, 0.3)[1].code == RULES.try_again_code


def test_process_at_another_address_does_not_own_the_endpoint() -> None:
    machine, now_s = _unowned(), 0.0
    while True:
        effects = machine.tick(now_s)
        for effect in [effect for effect in effects if isinstance(effect, actions.Connect)]:
            if effect.address == "first:1":
                effects += machine.failed(now_s, "Connection refused")
            else:
                machine.opened(now_s)
                effects += machine.broken(now_s)
        left = [effect for effect in effects if isinstance(effect, actions.Leave)]
        if left:
            break
        now_s = max(now_s, machine.alarm_s) + 0.001
    assert left[0].code == 2


def test_a_launcher_that_has_accepted_a_first_decision_gives_up_as_those_of_a_job_do() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 1, True), 1.0)
    machine.broken(1.0)
    at_s, left = _given_up(machine, 1.0)
    assert 1.0 + GIVE_UP_S <= at_s < 1.0 + GIVE_UP_S + 1.0
    assert left.code == RULES.try_again_code


@pytest.mark.parametrize(("place", "after_s"), [(None, 60.0), (1, 10.0), (2, 60.0)])
def test_a_launcher_that_finds_no_coordinator_at_the_start_tells_why_soon_and_at_the_end(
    place: int | None, after_s: float
) -> None:
    machine, lines, left, now_s = member(rank=place), [], [], 0.0
    machine.identity = replace(machine.identity, rules=replace(RULES, max_nodes=1000))
    while not left:
        effects = machine.tick(now_s)
        for effect in [effect for effect in effects if isinstance(effect, actions.Connect)]:
            effects += machine.failed(now_s, "no route" if effect.address == "first:1" else "Connection refused")
        lines += [(now_s, effect.text) for effect in effects if isinstance(effect, actions.Say)]
        left += [effect for effect in effects if isinstance(effect, actions.Leave)]
        now_s = max(now_s, machine.alarm_s) + 0.001
    ((said_s, line),) = lines
    timeout = f"{RULES.join_timeout_s:g} s (--rdzv-conf join_timeout)"
    assert after_s <= said_s < after_s + 1.0
    problems = "first:1: no route; second:1: Connection refused"
    assert line == f"no coordinator reached ({problems}); trying for {timeout}"
    assert left == [actions.Leave(RULES.try_again_code, f"no coordinator reached for {timeout} ({problems})")]


def test_a_launcher_that_was_sent_elsewhere_tells_why_it_was_not_led_there() -> None:
    machine, lines, now_s = member(), [], 0.0
    while not lines:
        effects = machine.tick(now_s)
        for effect in [effect for effect in effects if isinstance(effect, actions.Connect)]:
            if effect.address == "first:1":
                machine.opened(now_s)
                effects += machine.heard(m.Wait(0, 0, soon=True, elsewhere="moved-to:1"), now_s)
            else:
                effects += machine.failed(now_s, "Connection refused")
        lines += [effect.text for effect in effects if isinstance(effect, actions.Say)]
        now_s = max(now_s, machine.alarm_s) + 0.001
    assert "first:1: the coordinator there does not lead; moved-to:1: Connection refused" in lines[0]


def test_a_port_that_closes_connections_and_a_coordinator_that_refuses_are_named() -> None:
    machine, lines, now_s = member(), [], 0.0
    while not lines:
        effects = machine.tick(now_s)
        for effect in [effect for effect in effects if isinstance(effect, actions.Connect)]:
            machine.opened(now_s)
            refused = m.Dismiss(m.REFUSED, "the coordinator at second:1 has another secret")
            effects += machine.broken(now_s) if effect.address == "first:1" else machine.heard(refused, now_s)
        lines += [effect.text for effect in effects if isinstance(effect, actions.Say)]
        now_s = max(now_s, machine.alarm_s) + 0.001
    assert f"(first:1: the connection was closed there; second:1: {refused.text})" in lines[0]
    assert 10.0 <= now_s < 12.0  # at once, as in all jobs of few nodes


def test_a_connection_that_stays_open_without_an_answer_is_named_too() -> None:
    machine, lines, now_s = member(), [], 0.0
    while not lines:  # nothing ever happens on a connection
        now_s = max(now_s, machine.alarm_s) + 0.001
        lines = [effect.text for effect in machine.tick(now_s) if isinstance(effect, actions.Say)]
    assert f"first:1: {NO_ANSWER}; second:1: {NO_ANSWER}" in lines[0]


def test_a_launcher_that_a_coordinator_leads_does_not_tell_that_it_reaches_none() -> None:
    machine = led(member())
    machine.tell(m.Ready(), 0.0)
    told, now_s = [], 0.0
    while now_s < 3 * 60.0:
        now_s = max(now_s, machine.alarm_s) + 0.001
        effects = machine.tick(now_s) + machine.heard(m.Beat(), now_s)
        told += [effect for effect in effects if isinstance(effect, actions.Say | actions.Leave)]
    assert told == []


@pytest.mark.parametrize(("is_named", "has_trained", "code"), [(False, False, 2), (True, False, 0), (False, True, 0)])
def test_launcher_that_never_trained_does_not_exit_with_0_for_a_job_that_may_be_another(
    is_named: bool, has_trained: bool, code: int
) -> None:
    standing = m.NodeStatus(cycle=0 if has_trained else -1)
    identity = replace(member().identity, is_named=is_named)
    finished = replace(decision(1, DecisionKind.END, size=2), code=0)
    left = give_up_policy.at_end(identity, finished, standing)
    assert (left.code, left.is_of_all) == (code, code == 0)
    assert ("--rdzv-id" in left.text) is (code == 2)
    assert give_up_policy.at_end(identity, replace(finished, code=1), standing).code == 1
    excluded = replace(m.NodeStatus(), phase=m.NodePhase.EXCLUDED)
    assert give_up_policy.at_end(identity, finished, excluded).code == 0
    nobody_trained = replace(finished, world=0)
    assert give_up_policy.at_end(identity, nobody_trained, standing).code == 0
