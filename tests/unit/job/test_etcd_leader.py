"""A leader's thread for etcd: what was asked for is done, in order, once etcd answers; a lost lock ends the leader."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import pytest

from megatron_ft.job import etcd_leader
from megatron_ft.job.etcd_leader import LeaderInEtcd, LockLost
from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules.decisions import Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from tests.support.etcd_model import EtcdModel

BOUND_S = 20.0
RECORD = DecisionRecord(Decision(0, "c.0", DecisionKind.START, 0, 2), "store", ("i0", "i1"), ("h0", "h1"))


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> EtcdModel:
    monkeypatch.setattr(etcd_leader, "_AGAIN_S", 0.01)
    return EtcdModel()


def ledger_of(etcd: EtcdModel) -> Ledger:
    held = etcd_keys.take(etcd, "job", "a:1")
    assert held is not None
    return Ledger(etcd, "job", held, new_name=lambda: "life")


def leader_of(etcd: EtcdModel) -> LeaderInEtcd:
    ledger = ledger_of(etcd)
    assert ledger.enter()
    return LeaderInEtcd(ledger)


def until(leader: LeaderInEtcd, condition: Callable[[int], bool]) -> int:
    """Serve the leader until that holds for the number of changes that were made; return it."""
    changes, until_s = 0, time.monotonic() + BOUND_S
    while not condition(changes):
        assert time.monotonic() < until_s
        if select.select([leader.fileno()], [], [], 0.1)[0]:
            changes += leader.take()
    return changes


def test_decision_waits_until_etcd_answers_and_the_leader_knows_meanwhile(etcd: EtcdModel) -> None:
    leader = leader_of(etcd)
    etcd.is_away = True
    leader.keep(RECORD)
    assert until(leader, lambda _changes: bool(leader.problem)) == 0
    assert "Connection refused" in leader.problem
    since_s = leader.away_since_s
    assert until(leader, lambda _changes: len(etcd.calls) > 20) == 0
    assert leader.away_since_s == since_s
    etcd.is_away = False
    assert until(leader, lambda changes: changes > 0) == 1
    assert leader.problem == ""
    assert "megatron_ft/job/life/000000000000" in etcd.names()


def test_lease_is_renewed_when_the_loop_asks_and_once_at_a_time(etcd: EtcdModel) -> None:
    leader = leader_of(etcd)
    before = etcd.calls.count("lease/keepalive")
    leader.renew(0.0)
    leader.renew(1e9)
    until(leader, lambda _changes: leader.due_s != float("inf"))
    assert etcd.calls.count("lease/keepalive") == before + 2  # the lease of the lock, and that of the decisions
    assert 0 < leader.due_s - time.monotonic() <= etcd_keys.RENEW_S


def test_leader_whose_lease_has_expired_has_lost_the_lock(etcd: EtcdModel) -> None:
    leader = leader_of(etcd)
    etcd.pass_time(etcd_keys.LEASE_S)
    leader.renew(0.0)
    with pytest.raises(LockLost):
        until(leader, lambda _changes: False)


def test_leader_whose_decision_another_one_has_made_has_lost_the_lock(etcd: EtcdModel) -> None:
    leader = leader_of(etcd)
    etcd.pass_time(etcd_keys.LEASE_S)
    assert leader_of(etcd)
    leader.keep(RECORD)
    with pytest.raises(LockLost):
        until(leader, lambda _changes: False)


def test_another_life_begins_as_a_change(etcd: EtcdModel) -> None:
    leader = leader_of(etcd)
    leader.keep(RECORD)
    leader.begin_life()
    assert until(leader, lambda changes: changes > 1) == 2
    assert len(etcd.names()) == 2


def test_leader_begins_once_etcd_answers_or_ends_when_nobody_needs_it(etcd: EtcdModel) -> None:
    ledger = ledger_of(etcd)
    etcd.is_away = True
    tries = iter(range(5))
    assert not etcd_leader.enter(ledger, is_needed=lambda: next(tries) < 4)

    def comes_back() -> bool:
        etcd.is_away = next(more) < 3
        return True

    more = iter(range(9))
    assert etcd_leader.enter(ledger, is_needed=comes_back)
