"""A leader's decisions in etcd: what follows from one waits until etcd has it; a lost lock ends the leader."""

from __future__ import annotations

import math

import pytest

from megatron_ft.job.etcd_leader import AGAIN_S, Decisions
from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules.actions import CoordinatorEffect, Quit, Send
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from megatron_ft.job.rules.messages import Admitted, Beat, Dismiss, Rules
from tests.support.etcd_model import EtcdModel

RULES = Rules(1, 2, join_timeout_s=60.0)


def decided(number: int, kind: DecisionKind = DecisionKind.START, code: int = 0) -> DecisionRecord:
    return DecisionRecord(Decision(number, f"c.{number}", kind, number, 2, code=code), "store")


class Leader:
    """A leader without a thread: the test does its work."""

    def __init__(self) -> None:
        self.model, self.now_s = EtcdModel(), 0.0
        held = etcd_keys.take(self.model, "job", "a:1")
        assert held is not None
        ledger = Ledger(self.model, "job", held.epoch, held.lease)
        self.decisions = Decisions(ledger, RULES, [1, 2])

    def works(self) -> list[CoordinatorEffect]:
        """Ask etcd, and do nothing else meanwhile; what follows from its answer."""
        assert self.decisions.due_s <= self.now_s
        request = self.decisions.request()
        assert self.decisions.due_s == math.inf
        return self.decisions.answered(request, self.now_s)


def test_effects_of_a_decision_wait_until_etcd_has_it() -> None:
    leader, follows = Leader(), Send([1], Assignment(decided(0).decision, 0))
    decisions, tells_nothing = leader.decisions, [Send([2], Admitted(5)), Send([1], Beat())]
    renewal = decisions.request()
    assert decisions.admit([decided(0), follows, *tells_nothing], 0.0) == tells_nothing
    assert decisions.answered(renewal, 0.0) == []
    leader.model.is_away = True
    assert leader.works() == []
    assert "Connection refused" in decisions.problem
    assert decisions.due_s == AGAIN_S
    leader.model.is_away, leader.now_s = False, AGAIN_S
    assert leader.works() == [decided(0), follows]
    assert "megatron_ft/job/decision" in leader.model.names()
    assert (decisions.problem, decisions.due_s) == ("", AGAIN_S + etcd_keys.RENEW_S)
    assert decisions.admit([follows], 1.0) == [follows]
    assert decisions.admit([decided(1), follows, decided(2), follows], 3.0) == []
    assert [leader.works(), leader.works()] == [[decided(1), follows], [decided(2), follows]]


@pytest.mark.parametrize(("change", "code"), [(decided(0), 94), (decided(1, DecisionKind.END, 3), 3)])
def test_launchers_are_dismissed_if_no_decision_can_be_kept_for_the_join_timeout(
    change: DecisionRecord, code: int
) -> None:
    leader = Leader()
    leader.decisions.admit([change], 0.0)
    leader.model.refuses = "kv/txn"  # the lease is renewed all the same
    for leader.now_s in (0.0, *range(1, 60), 59.9):
        assert leader.works() == []
    leader.now_s = 60.3
    text = "no decision could be kept for 60 s: etcd at http://etcd:2379: database space exceeded"
    assert leader.works() == [Send([1, 2], Dismiss(code, text)), Quit()]


def test_leader_that_has_lost_the_lock_ends_at_once() -> None:
    leader = Leader()
    leader.decisions.admit([decided(0)], 0.0)
    leader.model.pass_time(etcd_keys.LEASE_S)
    assert leader.works() == [Quit()]
