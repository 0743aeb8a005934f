"""A leader's decisions in etcd: what follows from one waits until etcd has it; a lost lock ends the leader."""

from __future__ import annotations

import pytest

from megatron_ft.job.etcd_leader import LeaderInEtcd, LeaderOver, Work
from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules.actions import BeginLife, CoordinatorEffect, Send
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from megatron_ft.job.rules.messages import Admitted, Beat, Dismiss, Rules
from tests.support.etcd_model import EtcdModel

RULES = Rules(1, 2, join_timeout_s=60.0)


def decided(number: int, kind: DecisionKind = DecisionKind.START, code: int = 0) -> DecisionRecord:
    return DecisionRecord(Decision(number, f"c.{number}", kind, number, 2, code=code), "store")


def ledger_of(etcd: EtcdModel) -> Ledger:
    held = etcd_keys.take(etcd, "job", "a:1")
    assert held is not None
    return Ledger(etcd, "job", held, new_name=lambda: "life")


class Leader:
    """A leader without a thread: the test does its work."""

    def __init__(self) -> None:
        self.model, self.work, self.now_s = EtcdModel(), list[Work](), 0.0
        ledger = ledger_of(self.model)
        assert ledger.enter()
        self.etcd = LeaderInEtcd(
            ledger, RULES, clock=lambda: self.now_s, submit=lambda work, _delay_s: self.work.append(work)
        )

    def works(self) -> list[CoordinatorEffect]:
        """Ask etcd, and do nothing else meanwhile; what follows from its answer."""
        (work,) = self.work
        self.work.clear()
        return self.etcd.answered(work, work.ask)


def test_effects_of_a_decision_wait_until_etcd_has_it() -> None:
    leader, follows = Leader(), Send([1], Assignment(decided(0).decision, 0))
    tells_nothing = [Send([2], Admitted(5)), Send([1], Beat())]
    assert leader.etcd.admit([decided(0), follows, *tells_nothing]) == tells_nothing
    leader.model.is_away = True
    assert leader.works() == []
    assert "Connection refused" in leader.etcd.problem
    leader.model.is_away = False
    assert leader.works() == [decided(0), follows]
    assert "megatron_ft/job/life/000000000000" in leader.model.names()
    assert (leader.etcd.problem, leader.work) == ("", [])
    assert leader.etcd.admit([follows]) == [follows]


@pytest.mark.parametrize(
    ("change", "code"), [(decided(0), 94), (decided(1, DecisionKind.END, 3), 3), (BeginLife(), 94)]
)
def test_launchers_are_dismissed_if_no_decision_can_be_kept_for_the_join_timeout(
    change: DecisionRecord | BeginLife, code: int
) -> None:
    leader = Leader()
    leader.etcd.admit([change])
    for leader.now_s in (6.0, 31.0, 65.9):  # the lease is renewed all the same
        leader.model.is_away = True
        assert leader.works() == []
        leader.model.is_away = False
        assert leader.etcd.answered(Work(lambda: True, is_change=False), lambda: True) == []
        assert leader.etcd.problem == ""
    leader.model.is_away, leader.now_s = True, 66.0
    with pytest.raises(LeaderOver) as over:
        leader.works()
    text = "no decision could be kept for 60 s: etcd at http://etcd:2379: Connection refused"
    assert over.value.dismissal == Dismiss(code, text)
