"""A coordinator that was started by hand, and whose job's launchers have gone without a word."""

from __future__ import annotations

import pytest

from megatron_ft.core.coordinator.admission import FORGETS_S
from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.job import actions
from megatron_ft.core.job import messages as m
from tests.support.job_machines import answers

RULES = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)


def coordinator(names: str, *, owned: bool = False) -> Coordinator:
    """With two of them cycle 0 runs; the connection of each is its number."""
    machine = Coordinator("c", founds=True, owned=owned)
    for link, name in enumerate(names):
        comes(machine, link, name, owns=owned and link == 0)
    decided = answers(machine, machine.settle(0.0))
    assert any(isinstance(effect, actions.Decided) for effect in decided) is (len(names) == 2)
    return machine


def comes(machine: Coordinator, link: int, name: str, *, owns: bool = False, at_s: float = 0.0) -> None:
    machine.handle(actions.Heard(link, m.Hello("job", RULES, name, 1, name, owns=owns)), at_s)
    machine.handle(actions.Heard(link, m.Ready()), at_s)


def quits(machine: Coordinator, since_s: float, until_s: float, *, alive: int | None = None) -> list[actions.Quit]:
    """In that time; one connection may be alive."""
    effects: list[actions.CoordinatorEffect] = []
    for second in range(int(since_s) + 1, int(until_s) + 1):
        if alive is not None:
            machine.handle(actions.Heard(alive, m.Beat()), float(second))
        effects += machine.settle(float(second))
    return [effect for effect in effects if isinstance(effect, actions.Quit)]


@pytest.mark.parametrize("names", ["ab", "a"])
def test_coordinator_forgets_a_job_once_none_of_its_launchers_can_come_back(names: str) -> None:
    machine = coordinator(names)
    for link in range(len(names)):
        machine.handle(actions.Broken(link), 0.0)
    assert quits(machine, 0, FORGETS_S - 1) == []
    assert quits(machine, FORGETS_S - 1, FORGETS_S + 1)[0] == actions.Quit(forgets=True)


def test_launcher_that_has_just_come_does_not_keep_the_old_job_alive() -> None:
    machine = coordinator("ab")
    for link in range(2):
        machine.handle(actions.Broken(link), 0.0)
    quits(machine, 0, 20)
    comes(machine, 2, "c", at_s=20.0)
    assert quits(machine, 20, FORGETS_S - 1, alive=2) == []
    assert quits(machine, FORGETS_S - 1, FORGETS_S + 1, alive=2)[0] == actions.Quit(forgets=True)


def test_launcher_that_is_still_connected_keeps_the_job_from_being_forgotten() -> None:
    machine = coordinator("ab")
    machine.handle(actions.Broken(0), 0.0)
    assert quits(machine, 0, 3 * FORGETS_S, alive=1) == []
    machine.handle(actions.Broken(1), 3 * FORGETS_S)
    assert quits(machine, 3 * FORGETS_S, 4 * FORGETS_S - 1) == []
    assert quits(machine, 4 * FORGETS_S - 1, 4 * FORGETS_S + 1) != []


def test_a_launcher_that_waits_for_others_is_waited_with() -> None:
    assert quits(coordinator("a"), 0, 3 * FORGETS_S, alive=0) == []


def test_coordinator_without_a_job_has_nothing_to_forget() -> None:
    assert quits(coordinator(""), 0, 3 * FORGETS_S) == []


def test_the_coordinator_of_a_launcher_forgets_nothing() -> None:
    machine = coordinator("ab", owned=True)
    for link in range(2):
        machine.handle(actions.Broken(link), 0.0)
    assert quits(machine, 0, 3 * FORGETS_S) == []
