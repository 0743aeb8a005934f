"""What a launcher's member passes on of learning, and what it keeps for the next coordinator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.member import Member
from megatron_ft.core.job.restart_policy import Outcome
from megatron_ft.core.timeouts.exchange import Learned, Moment, Raised, Survey
from tests.support.job_machines import led, member

SURVEY, LEARNED, RAISED = Survey(4, 1), Learned(4, 1, Moment.SAVE), Raised(4, "step")


def running() -> Member:
    """Cycle 4 runs."""
    machine = led(member())
    machine.standing = m.NodeStatus(phase=m.NodePhase.RUNNING, cycle=4)
    return machine


def test_learning_is_passed_on_while_its_cycle_runs() -> None:
    machine = running()
    for message in (SURVEY, LEARNED, RAISED):
        assert machine.heard(message, 0.0) == [message]
        assert machine.heard(replace(message, cycle=3), 0.0) == []


def test_kills_and_results_are_passed_on_right_after_the_end_of_their_cycle() -> None:
    machine = running()
    machine.heard(m.End(4, Outcome.FAILED, restarts=True), 0.0)
    assert machine.heard(SURVEY, 0.0) == []
    assert machine.heard(LEARNED, 0.0) == [LEARNED]
    assert machine.heard(RAISED, 0.0) == [RAISED]


@pytest.mark.parametrize("is_own", [True, False])
def test_kills_are_kept_for_the_next_coordinator(is_own: bool) -> None:
    machine = running()
    for _ in range(2):
        machine.tell(RAISED, 0.0) if is_own else machine.heard(RAISED, 0.0)
    machine.broken(0.0)
    machine.tick(1.0)
    hello = next(each.message for each in machine.opened(1.0) if isinstance(each, edge.Transmit))
    assert isinstance(hello, m.Hello)
    assert hello.standing.raised == ("step",)


def test_kills_of_another_cycle_are_not_kept() -> None:
    machine = running()
    machine.tell(Raised(3, "step"), 0.0)
    assert machine.standing.raised == ()
