"""A launcher whose leader is named in etcd: it follows the highest epoch that it has heard of."""

from __future__ import annotations

from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.member import Member
from tests.support.job_machines import member


def connects(effects: list[actions.MemberEffect]) -> list[str]:
    return [each.address for each in effects if isinstance(each, actions.Connect) and each.address]


def is_disconnected(effects: list[actions.MemberEffect]) -> bool:
    return actions.Connect() in effects


def following(address: str = "a:1", epoch: int = 5) -> Member:
    """It is led by a leader of that epoch."""
    machine = member(is_in_etcd=True)
    machine.leader_at(address, epoch, 40, 0.0)
    assert connects(machine.tick(0.0)) == [address]
    assert not machine.leader_at(address, epoch, 41, 0.0), "it is being connected to"
    machine.opened(0.0)
    machine.heard(m.Admitted(epoch), 0.0)
    assert machine.is_led
    return machine


def test_revision_at_which_it_looked_first_is_that_of_its_start() -> None:
    machine = member(is_in_etcd=True)
    machine.leader_at("", 0, 40, 0.0)
    machine.leader_at("a:1", 45, 47, 1.0)
    machine.tick(1.0)
    (hello,) = [each.message for each in machine.opened(1.0) if isinstance(each, actions.Transmit)]
    assert isinstance(hello, m.Hello)
    assert hello.since == 40


def test_epoch_that_a_leader_tells_counts_before_etcd_does() -> None:
    machine = following()
    machine.broken(1.0)
    machine.tick(2.0)
    machine.opened(2.0)
    machine.heard(m.Admitted(8), 2.0)
    assert not is_disconnected(machine.leader_at("b:1", 7, 50, 3.0))
    assert is_disconnected(machine.heard(m.Admitted(7), 3.0))


def test_user_is_told_why_no_leader_was_found() -> None:
    machine = member(is_in_etcd=True)
    machine.problem = "etcd at http://e:2379: Connection refused"
    now_s, said = 0.0, []
    while now_s < 12.0:
        now_s = max(now_s, machine.alarm_s)
        said += [each.text for each in machine.tick(now_s) if isinstance(each, m.Tell)]
    (line,) = said
    assert "etcd at http://e:2379: Connection refused" in line
