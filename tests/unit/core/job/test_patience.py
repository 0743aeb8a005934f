"""How long a launcher waits for a coordinator before it gives up."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.member import Member
from megatron_ft.core.job.patience import GIVE_UP_S, REPORT_UNREACHED_S
from tests.support.job_machines import RULES, decision, led, member


def _given_up(machine: Member, now_s: float) -> tuple[float, Any]:
    """When it leaves if no coordinator can be reached, and how."""
    while True:
        effects = machine.tick(now_s)
        if any(isinstance(effect, edge.Connect) for effect in effects):
            effects += machine.failed(now_s)
        left = [effect for effect in effects if isinstance(effect, edge.Leave)]
        if left:
            return now_s, left[0]
        now_s = max(now_s, machine.alarm_s) + 0.001


def test_the_launcher_of_an_excluded_node_gives_up_when_those_of_the_job_have() -> None:
    machine = led(member())
    machine.tell(m.Goodbye("rank 0 asked for it", excluded=True), 1.0, 5.0)
    machine.heard(m.Stay(), 1.0)
    at_s, left = _given_up(machine, 1.0)
    assert 1.0 + GIVE_UP_S <= at_s < 1.0 + GIVE_UP_S + 1.0
    assert (left.code, left.text) == (0, "no coordinator is reachable any more")


def test_a_launcher_that_has_had_no_part_in_the_job_yet_waits_for_the_join_timeout() -> None:
    at_s, left = _given_up(member(), 0.0)
    assert RULES.join_timeout_s <= at_s < RULES.join_timeout_s + 1.0
    assert left.code == RULES.try_again_code


def test_a_launcher_that_has_accepted_a_first_decision_gives_up_as_those_of_a_job_do() -> None:
    machine = led(member())
    machine.heard(m.Propose((1, "c", 1), decision(), 1, True), 1.0)
    machine.broken(1.0)
    at_s, left = _given_up(machine, 1.0)
    assert 1.0 + GIVE_UP_S <= at_s < 1.0 + GIVE_UP_S + 1.0
    assert left.code == RULES.try_again_code


def test_a_launcher_that_reaches_no_coordinator_at_the_start_tells_why_soon_and_at_the_end() -> None:
    machine, lines, left, now_s = member(), [], [], 0.0
    while not left:
        effects = machine.tick(now_s)
        connects = [effect.address for effect in effects if isinstance(effect, edge.Connect)]
        if connects:
            effects += machine.failed(now_s, "no route" if connects == ["first:1"] else "Connection refused")
        lines += [(now_s, effect.text) for effect in effects if isinstance(effect, edge.Say)]
        left += [effect for effect in effects if isinstance(effect, edge.Leave)]
        now_s = max(now_s, machine.alarm_s) + 0.001
    ((said_s, line),) = lines
    timeout = f"{RULES.join_timeout_s:g} s (--rdzv-conf join_timeout)"
    assert REPORT_UNREACHED_S <= said_s < REPORT_UNREACHED_S + 1.0
    assert line == f"coordinator at first:1 not reached yet: no route; trying for {timeout}"
    assert left == [edge.Leave(RULES.try_again_code, f"coordinator at first:1 not reached within {timeout}: no route")]


def test_a_launcher_that_a_coordinator_leads_does_not_tell_that_it_reaches_none() -> None:
    machine = led(member())
    machine.tell(m.Ready(), 0.0)
    told, now_s = [], 0.0
    while now_s < 3 * REPORT_UNREACHED_S:
        now_s = max(now_s, machine.alarm_s) + 0.001
        effects = machine.tick(now_s) + machine.heard(m.Beat(), now_s)
        told += [effect for effect in effects if isinstance(effect, edge.Say | edge.Leave)]
    assert told == []
