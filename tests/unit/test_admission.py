"""Who is let into a job, and what the others are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_ft.core.job.admission import differences, refusal
from megatron_ft.core.job.messages import Dismiss, Hello, Rules

RULES = Rules(min_nodes=2, max_nodes=3, max_restarts=3)


def hello(job: str = "job", **other_rules: Any) -> Hello:
    return Hello(job, dataclasses.replace(RULES, **other_rules), "word", 1, "host")


def test_launcher_of_the_same_job_with_the_same_options_is_let_in() -> None:
    assert refusal(hello(), "job", RULES) is None


def test_launcher_of_another_job_is_told_that_it_needs_an_endpoint_of_its_own() -> None:
    told = "another job meets at this address: give each job its own --rdzv-endpoint"
    assert refusal(hello("another", max_restarts=5), "job", RULES) == Dismiss(2, told)


def test_launcher_with_other_options_is_told_which() -> None:
    told = (
        "this launcher's options differ from those of the others: "
        "--nnodes is 2:4 here, 2:3 there; --max-restarts is 5 here, 3 there"
    )
    assert refusal(hello(max_nodes=4, max_restarts=5), "job", RULES) == Dismiss(2, told)


@pytest.mark.parametrize("field", dataclasses.fields(Rules), ids=lambda field: field.name)
def test_every_rule_that_differs_has_a_name(field: dataclasses.Field[Any]) -> None:
    value = getattr(RULES, field.name)
    other = dataclasses.replace(RULES, **{field.name: not value if isinstance(value, bool) else (value or 0) + 7})
    ((name, own, others),) = differences(RULES, other)
    assert name
    assert own != others
