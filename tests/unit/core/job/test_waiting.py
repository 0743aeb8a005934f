"""How long a launcher waits at a coordinator that can't lead, and where it goes next."""

from __future__ import annotations

import pytest

from megatron_ft.core.job import actions
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.member import Member
from tests.support.job_machines import decision, led, member


def waiting(address: str, wait: m.Wait) -> Member:
    """A launcher of a job whose coordinator was at "first:1": its host is gone, and this one is asked next."""
    machine = led(member())
    machine.heard(m.Commit(decision(), candidates=("third:1", "fourth:1")), 0.0)
    machine.broken(1.0, silent=True)
    now_s = 1.0
    while (tried := asked(machine.tick(now_s))) != [address]:
        if tried:
            machine.failed(now_s)
        now_s += 0.01
        assert now_s < 2.0
    machine.opened(now_s)
    machine.heard(wait, now_s)
    return machine


def asked(effects: list[actions.MemberEffect]) -> list[str]:
    return [effect.address for effect in effects if isinstance(effect, actions.Connect)]


def next_asked(machine: Member, from_s: float = 2.0) -> tuple[str, float]:
    """Which address is tried next, and after how many seconds."""
    for tenth in range(round(10 * from_s), 150):
        machine.heard(m.Beat(), tenth / 10)
        if found := asked(machine.tick(tenth / 10)):
            return found[0], tenth / 10 - 1.0
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize(
    ("address", "wait", "least_s", "most_s"),
    [
        ("third:1", m.Wait(1, 4, soon=False), 2.0, 5.5),
        ("third:1", m.Wait(1, 4, soon=False, gathers=True), 5.0, 8.0),
    ],
)
def test_launcher_waits_longer_at_a_first_coordinator_the_others_have_visited(
    address: str, wait: m.Wait, least_s: float, most_s: float
) -> None:
    after_s = next_asked(waiting(address, wait))[1]
    assert least_s <= after_s <= most_s


def test_launcher_waits_no_longer_at_a_later_coordinator_the_others_visited() -> None:
    machine = waiting("third:1", m.Wait(1, 4, soon=False))
    now_s = 1.0 + next_asked(machine)[1]
    machine.failed(now_s)  # the lost coordinator's host again
    assert next_asked(machine, now_s) == ("fourth:1", pytest.approx(now_s - 1.0, abs=0.3))
    machine.opened(now_s)
    machine.heard(m.Wait(1, 4, soon=False, gathers=True), now_s)
    assert next_asked(machine, now_s)[1] <= now_s - 1.0 + 1.0


def test_launcher_goes_at_once_where_another_one_has_found_a_coordinator() -> None:
    machine = waiting("third:1", m.Wait(1, 4, soon=False, elsewhere="fifth:1"))
    assert asked(machine.tick(2.0)) == ["fifth:1"]


def test_an_address_that_was_tried_is_tried_again_only_for_what_became_known_since() -> None:
    machine = waiting("fourth:1", m.Wait(1, 4, soon=False, elsewhere="third:1", age_s=1.0))
    assert asked(machine.tick(2.0)) == []
    machine.heard(m.Wait(1, 4, soon=False, gathers=True, elsewhere="third:1", age_s=1.6), 2.1)
    assert asked(machine.tick(2.1)) == []
    machine.heard(m.Wait(1, 4, soon=False, elsewhere="third:1", age_s=0.1), 2.3)
    assert asked(machine.tick(2.3)) == ["third:1"]


def test_news_older_than_the_last_try_do_not_lead_back_to_a_coordinator_that_does_not_lead() -> None:
    machine = waiting("third:1", m.Wait(1, 4, soon=False))
    now_s = 1.0 + next_asked(machine)[1]
    machine.opened(now_s)
    machine.heard(m.Wait(1, 4, soon=False, elsewhere="third:1", age_s=1.0), now_s + 0.1)
    assert asked(machine.tick(now_s + 0.1)) == []
    machine.heard(m.Wait(1, 4, soon=False, elsewhere="third:1", age_s=0.05), now_s + 0.2)
    assert asked(machine.tick(now_s + 0.2)) == ["third:1"]


def test_an_address_that_did_not_answer_is_tried_once_more_if_a_coordinator_is_said_to_be_there() -> None:
    machine = waiting("third:1", m.Wait(1, 4, soon=False))
    machine.heard(m.Wait(1, 4, soon=False, elsewhere="first:1"), 1.6)
    assert asked(machine.tick(1.7)) == ["first:1"]


def test_launcher_stays_if_the_coordinator_is_said_to_be_where_it_waits() -> None:
    for address in ("third:1", ""):
        machine = waiting("third:1", m.Wait(1, 4, soon=False))
        machine.heard(m.Wait(1, 4, soon=False, elsewhere=address), 1.6)
        assert asked(machine.tick(1.7)) == [], address
