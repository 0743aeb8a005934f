"""What a job keeps in etcd: one leader, one decision of each number, one life at a time."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules.decisions import Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import EtcdAway, Ledger
from megatron_ft.job.rules.messages import LeaseHeld
from tests.support.etcd_model import EtcdModel

JOB = "run/1000//train.py"
_names = (f"{number:032x}" for number in itertools.count())


def record(number: int, word: str = "a") -> DecisionRecord:
    decision = Decision(number, f"{word}.{number}", DecisionKind.START, cycle=number, world=2)
    return DecisionRecord(decision, "store", ("i0", "i1"), ("host0", "host1"))


def lock_taken(etcd: EtcdModel, address: str = "host0:1") -> LeaseHeld:
    held = etcd_keys.take(etcd, JOB, address)
    assert held is not None
    return held


def entered(etcd: EtcdModel, held: LeaseHeld) -> Ledger:
    ledger = Ledger(etcd, JOB, held, new_name=lambda: next(_names))
    assert ledger.enter()
    return ledger


def last(ledger: Ledger) -> DecisionRecord | None:
    """The decision that a leader has found when it began."""
    return None if ledger.former is None else replace(ledger.former, revision=0)


def test_lock_is_taken_once_until_it_expires_or_is_given_up_and_each_leader_has_a_higher_epoch() -> None:
    etcd = EtcdModel()
    assert etcd_keys.look(etcd, JOB).address == ""
    first = lock_taken(etcd)
    assert etcd_keys.look(etcd, JOB)[:2] == ("host0:1", first.epoch)
    assert etcd_keys.take(etcd, JOB, "host1:1") is None
    assert list(etcd.leases) == [first.lease]  # that of the vain try has been given up
    etcd.pass_time(etcd_keys.LEASE_S)
    second = lock_taken(etcd, "host1:1")
    assert etcd_keys.look(etcd, JOB)[:2] == ("host1:1", second.epoch)
    assert second.epoch > first.epoch
    assert etcd_keys.look(etcd, "run").address == etcd_keys.look(etcd, f"{JOB}/leader").address == ""  # of other jobs
    etcd_keys.release(etcd, second.lease)
    etcd_keys.release(etcd, second.lease)  # twice does no harm
    assert etcd_keys.take(etcd, JOB, "host2:1") is not None


def test_next_leader_finds_the_last_decision_though_the_answer_to_it_was_lost() -> None:
    etcd = EtcdModel()
    ledger = entered(etcd, lock_taken(etcd))
    assert ledger.former is None
    for number in range(12):
        assert ledger.keep(record(number))
    etcd.loses_answers = 1
    with pytest.raises(EtcdAway):
        ledger.keep(record(12))
    assert ledger.keep(record(12))  # it was made when it was tried before
    made = etcd.revision
    etcd.pass_time(etcd_keys.LEASE_S)
    later = entered(etcd, lock_taken(etcd))
    assert last(later) == record(12)
    assert later.former is not None
    assert later.former.revision == made
    assert len(etcd.names()) == 4  # the leader, the life, and the last two decisions


def test_leader_whose_lease_has_expired_decides_nothing() -> None:
    etcd = EtcdModel()
    paused = entered(etcd, lock_taken(etcd))
    assert paused.keep(record(0))
    assert not paused.keep(record(0, "b"))
    etcd.pass_time(etcd_keys.LEASE_S)
    assert not paused.keep(record(1, "paused"))
    later = entered(etcd, lock_taken(etcd, "host1:1"))
    assert not paused.keep(record(1, "paused"))
    assert not paused.begin_life()
    assert last(later) == record(0)
    assert later.keep(record(1))


def test_decisions_outlive_their_leader_for_a_day_and_are_renewed_by_the_next_one() -> None:
    etcd = EtcdModel()
    assert entered(etcd, lock_taken(etcd)).keep(record(0))
    for _ in range(3):
        etcd.pass_time(20 * 3600)
        assert last(entered(etcd, lock_taken(etcd))) == record(0)
    etcd.pass_time(24 * 3600)
    assert etcd.names() == []
    assert entered(etcd, lock_taken(etcd)).former is None
