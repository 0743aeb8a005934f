"""What a job keeps in etcd: one leader, one decision of each number, one life at a time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules.decisions import Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import EtcdAway, Ledger, Seen
from tests.support.etcd_model import EtcdModel

JOB = "run/1000//train.py"


def record(number: int, word: str = "a") -> DecisionRecord:
    decision = Decision(number, f"{word}.{number}", DecisionKind.START, cycle=number, world=2)
    return DecisionRecord(decision, "store", ("i0", "i1"), ("host0", "host1"))


def lock_taken(etcd: EtcdModel, address: str = "host0:1") -> Seen:
    held = etcd_keys.take(etcd, JOB, address)
    assert held is not None
    return held


def entered(etcd: EtcdModel, held: Seen) -> tuple[Ledger, DecisionRecord | None]:
    """A leader's ledger, and the decision that it has found when it began."""
    ledger = Ledger(etcd, JOB, held.epoch, held.lease)
    found = ledger.enter()
    assert ledger.renew()
    return ledger, None if found is None else replace(found, revision=0)


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


def test_decision_whose_answer_was_lost_is_made_once() -> None:
    etcd = EtcdModel()
    ledger, _ = entered(etcd, lock_taken(etcd))
    etcd.loses_answers = 1
    with pytest.raises(EtcdAway):
        ledger.keep(record(0))
    assert ledger.keep(record(0))
    assert ledger.keep(record(1))


def test_request_of_an_earlier_process_that_comes_late_changes_no_later_decision() -> None:
    etcd = EtcdModel()
    held = lock_taken(etcd)
    (late, _), (ledger, _) = entered(etcd, held), entered(etcd, held)
    assert ledger.keep(record(0))
    assert not late.keep(record(0, "late"))
    assert ledger.keep(record(1))


def test_leader_whose_lease_has_expired_decides_nothing() -> None:
    etcd = EtcdModel()
    paused, _ = entered(etcd, lock_taken(etcd))
    assert paused.keep(record(0))
    etcd.pass_time(etcd_keys.LEASE_S)
    assert not paused.keep(record(1, "paused"))
    later, found = entered(etcd, lock_taken(etcd, "host1:1"))
    assert not paused.keep(record(1, "paused"))
    assert not paused.renew()
    assert found == record(0)
    assert later.keep(record(1))


def test_decisions_outlive_their_leader_for_a_day_and_are_renewed_by_the_next_one() -> None:
    etcd = EtcdModel()
    ledger, _ = entered(etcd, lock_taken(etcd))
    assert ledger.keep(record(0))
    for _ in range(3):
        etcd.pass_time(20 * 3600)
        assert entered(etcd, lock_taken(etcd))[1] == record(0)
    etcd.pass_time(24 * 3600)
    assert etcd.names() == []
    assert entered(etcd, lock_taken(etcd))[1] is None
