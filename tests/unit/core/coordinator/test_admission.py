"""Who is let into a job, and what the others are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megatron_ft.core.coordinator.admission import NO_LEAD, Admission, OtherLead, differences, refusal
from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.job import actions
from megatron_ft.core.job.decisions import AcceptorState, Assignment, Decision, DecisionKind
from megatron_ft.core.job.member import MOVED_S
from megatron_ft.core.job.messages import Arguments, Beat, Dismiss, Hello, JobDefinition, Lead, Moved, Rules, Wait

RULES = Rules(min_nodes=2, max_nodes=3, max_restarts=3)
JOB = JobDefinition("job", RULES)


def hello(job: str = "job", **other_rules: Any) -> Hello:
    return Hello(job, msgspec.structs.replace(RULES, **other_rules), "word", 1, "host")


def test_launcher_of_the_same_job_with_the_same_options_is_let_in() -> None:
    assert refusal(hello(), JOB) is None


def test_launcher_of_another_job_is_told_that_it_needs_an_endpoint_of_its_own() -> None:
    told = (
        "another job already uses this rendezvous endpoint (job; this launcher's job is another): "
        "give each job its own --rdzv-endpoint, or all launchers of one job the same --rdzv-id"
    )
    assert refusal(hello("another", max_restarts=5), JOB) == Dismiss(2, told)


def test_launcher_with_other_options_is_told_which() -> None:
    told = (
        "this launcher's options differ from those of the others: "
        "--nnodes is 2:4 on this node, 2:3 on the others; --max-restarts is 5 on this node, 3 on the others"
    )
    assert refusal(hello(max_nodes=4, max_restarts=5), JOB) == Dismiss(2, told)


@pytest.mark.parametrize("name", Rules.__struct_fields__)
def test_every_rule_that_differs_has_a_name(name: str) -> None:
    value = getattr(RULES, name)
    other = msgspec.structs.replace(RULES, **{name: not value if isinstance(value, bool) else (value or 0) + 7})
    ((option, own, others),) = differences(RULES, other)
    assert option
    assert own != others


@pytest.mark.parametrize(
    ("words", "others", "are_of_one_job"),
    [
        ("--lr 1", "--lr 1", True),
        ("--lr 1", "--lr 2", False),
        ("--lr 1", "--lr 1 --resume", False),
        ("", "--resume", False),
        ("--machine-rank 0 --lr 1", "--machine-rank 3 --lr 1", True),
        ("--machine-rank=0", "--machine-rank=3", True),
        ("--machine-rank=0", "--another=3", False),
        ("--machine-rank 0", "--machine-rank 2", False),
        ("--local-addr node0 --workers 0", "--local-addr node3 --workers 0", True),
    ],
)
def test_arguments_tell_jobs_without_a_name_apart_but_for_what_is_each_nodes_own(
    words: str, others: str, are_of_one_job: bool
) -> None:
    here, there = Arguments(tuple(words.split()), ("0", "node0")), Arguments(tuple(others.split()), ("3", "node3"))
    defined = msgspec.structs.replace(JOB, arguments=here)
    answer = refusal(msgspec.structs.replace(hello(), arguments=there), defined)
    assert (answer is None) is are_of_one_job
    if answer is not None:
        assert answer.code == 2
        assert f"(job {words}; this launcher's job is job {others})".replace("job ;", "job;") in answer.text


def test_job_of_the_owner_is_defined_before_any_hello() -> None:
    owned, by_hand = Admission("", JOB), Admission("")
    for admission, own in ((owned, "job"), (by_hand, "another")):
        answer = admission.answer(hello("another"), now_s=0.0)
        assert (answer is None) is (admission is by_hand)
        assert admission.job == own


# -- a job that is coordinated at another address ---------------------------------------------------------------


def knowing() -> Hello:
    decided = Assignment(
        Decision(0, (0, "c", 1), DecisionKind.CYCLE, cycle=0, world=2, size=2, head=0), place=0, votes=True
    )
    return msgspec.structs.replace(hello(), memory=AcceptorState(decided=decided))


def test_launchers_are_told_where_the_job_has_moved_for_some_seconds() -> None:
    admission = Admission("")
    admission.answer(hello(), now_s=1.0)
    admission.moved(Moved("another", "c:29500"), 1.0)
    assert admission.other_lead(1.0) == NO_LEAD
    admission.moved(Moved("job", "b:29500", number=3), 1.0)
    assert admission.other_lead(2.0) == OtherLead("b:29500", 3, 1.0, 1.0 + 3 * MOVED_S)
    assert admission.answer(hello("another"), now_s=2.0) == refusal(hello("another"), JOB)
    assert admission.other_lead(1.0 + 3 * MOVED_S) == NO_LEAD


def test_redirect_ends_when_the_coordinators_own_launcher_comes_back() -> None:
    admission = Admission("there:1")
    assert admission.other_lead(3.0) == OtherLead("there:1", since_s=0.0)
    assert admission.answer(msgspec.structs.replace(hello(), owns=True), now_s=1.0) is None
    assert admission.other_lead(2.0) == NO_LEAD


def test_coordinator_without_a_cycle_begins_none_while_the_job_is_led_elsewhere() -> None:
    fresh = Coordinator("fresh", founds=True)
    fresh.handle(actions.Heard(1, msgspec.structs.replace(hello(), owns=True)), 0.0)
    fresh.handle(actions.Heard(2, Moved("job", "b:29500")), 0.1)
    assert [effect for effect in fresh.settle(0.1) if isinstance(effect, actions.Send)] == [
        actions.Send([1], Wait(0, 0, soon=True, elsewhere="b:29500"))
    ]
    fresh.settle(1.0 + 3 * MOVED_S)  # no other coordinator says so any more
    assert fresh.alarm_s < 5 * MOVED_S
    fresh.handle(actions.Heard(1, Beat()), 1.0 + 3 * MOVED_S)
    sent = [effect.message for effect in fresh.settle(2.0 + 3 * MOVED_S) if isinstance(effect, actions.Send)]
    assert [type(message) for message in sent] in ([Lead], [])


def test_coordinator_of_a_cycle_keeps_its_launchers() -> None:
    leader = Coordinator("leader", founds=True)
    leader.handle(actions.Heard(1, knowing()), 0.0)
    assert leader.handle(actions.Heard(2, Moved("job", "b:29500")), 0.2) == [actions.Drop(2)]
