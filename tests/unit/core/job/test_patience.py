"""How long a launcher waits for a coordinator before it gives up."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.member import GIVE_UP_S, Member
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
