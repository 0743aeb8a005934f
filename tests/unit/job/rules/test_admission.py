"""Who is let into a job, and what the others are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megatron_ft.job.rules import admission
from megatron_ft.job.rules.admission import refusal
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.messages import Dismiss, Hello, JobDefinition, Rules

RULES = Rules(min_nodes=2, max_nodes=3, max_restarts=3)
JOB = JobDefinition("job", RULES)


def hello(job: str = "job", **other_rules: Any) -> Hello:
    return Hello(job, msgspec.structs.replace(RULES, **other_rules), "word", "host")


def test_launcher_of_another_job_is_told_that_it_needs_an_endpoint_of_its_own() -> None:
    told = (
        "another job already uses this rendezvous endpoint (job; this launcher's job is another): "
        "give each job its own --rdzv-endpoint, or all launchers of one job the same --rdzv-id"
    )
    assert refusal(hello("another", max_restarts=5), JOB) == Dismiss(2, told)


def test_launcher_with_other_options_is_told_which() -> None:
    told = (
        "this launcher's options differ from those of the others: "
        "MAX of --nnodes is 4 on this node, 3 on the others; --max-restarts is 5 on this node, 3 on the others"
    )
    assert refusal(hello(max_nodes=4, max_restarts=5), JOB) == Dismiss(2, told)
    assert refusal(hello(), JOB) is None


@pytest.mark.parametrize("name", Rules.__struct_fields__)
def test_every_rule_that_differs_has_a_name(name: str) -> None:
    value = getattr(RULES, name)
    other = msgspec.structs.replace(RULES, **{name: not value if isinstance(value, bool) else (value or 0) + 7})
    refused = refusal(Hello("job", other, "word", "host"), JOB)
    assert refused is not None
    assert refused.text.count(" on this node, ") == 1


def test_launcher_started_after_an_end_that_etcd_has_is_of_the_next_life_whatever_its_age() -> None:
    for since, is_of_next in ((6, True), (5, True), (4, False)):
        came = msgspec.structs.replace(hello(), since=since, up_s=100.0)
        assert admission.is_of_next(came, JOB, since_end_s=0.0, end_revision=5) is is_of_next


@pytest.mark.parametrize(
    ("knows", "names_life", "up_s", "is_of_next"),
    [(False, False, 2.0, True), (False, False, 9.0, False), (False, True, 2.0, False), (True, False, 2.0, False)],
)
def test_launcher_that_was_started_after_the_end_is_of_the_next_life(
    knows: bool, names_life: bool, up_s: float, is_of_next: bool
) -> None:
    decided = Assignment(Decision(0, "c.1", DecisionKind.START, 0, 2), 0) if knows else None
    came = msgspec.structs.replace(hello(), decided=decided, names_life=names_life, up_s=up_s)
    assert admission.is_of_next(came, JOB, since_end_s=5.0) is is_of_next
