"""The rule for learned timeouts, and the conditions under which they are learned."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.learning.rule import Selection, calculate, in_force, select
from tests.bench.rules import PATTERNS, survives

ALL = {
    "loaded": True,
    "setup_open": False,
    "enough_steps": True,
    "saved": True,
    "async_saves": False,
    "is_closing": True,
}


@pytest.mark.parametrize("name", PATTERNS)
def test_healthy_pattern_ends_no_rank(name: str) -> None:
    section, seen_s, next_s, told = PATTERNS[name]
    assert survives(section, seen_s, next_s, told=told)


def test_timeout_is_five_times_the_longest_interval_averaged_with_the_one_before() -> None:
    assert calculate(20.0, None, 5.0) == 100.0
    assert calculate(40.0, 100.0, 5.0) == 150.0
    assert calculate(1.0, 150.0, 5.0) == 77.5


@pytest.mark.parametrize("factor", [0.1, 1.0, 5.0])
def test_timeout_is_never_below_125_percent_of_the_longest_interval(factor: float) -> None:
    assert calculate(400.0, 5.0, factor) >= 500.0
    assert in_force("step", 5.0, 400.0, floor_s=60.0) == 500.0


@pytest.mark.parametrize(
    ("name", "timeout_s"), [("step", 60.0), ("checkpointing", 60.0), ("out_of_section", 60.0), ("setup", 240.0)]
)
def test_interval_of_a_fraction_of_a_millisecond_makes_no_timeout_below_the_floor(name: str, timeout_s: float) -> None:
    assert in_force(name, calculate(0.0002, None, 5.0), 0.0002, floor_s=60.0) == timeout_s
    assert in_force(name, 1000.0, 200.0, floor_s=60.0) == 1000.0


def test_raised_timeout_goes_up_to_the_configured_one_and_never_below_what_was_learned() -> None:
    assert in_force("step", 75.0, 15.0, floor_s=60.0, raised=4.0) == 300.0
    assert in_force("step", 75.0, 15.0, floor_s=60.0, raised=4.0, cap_s=200.0) == 200.0
    assert in_force("step", 75.0, 15.0, floor_s=60.0, raised=4.0, cap_s=70.0) == 75.0


@pytest.mark.parametrize(
    ("changes", "sections", "out_of_section"),
    [
        ({}, ("setup", "step", "checkpointing"), True),
        ({"is_closing": False}, ("setup", "step", "checkpointing"), False),
        ({"loaded": False}, ("step", "checkpointing"), False),
        ({"setup_open": True}, ("step", "checkpointing"), False),
        ({"enough_steps": False}, ("setup", "checkpointing"), False),
        ({"saved": False}, ("setup", "step"), False),
        ({"async_saves": True}, ("setup", "step"), True),
    ],
)
def test_selection_follows_the_conditions_of_megatrons_modules(
    changes: dict[str, Any], sections: tuple[str, ...], out_of_section: bool
) -> None:
    found = select(**{**ALL, **changes})
    assert (found.sections, found.out_of_section) == (sections, out_of_section)
    left_out = 3 - len(sections) + (not out_of_section and found != Selection(sections=sections, out_of_section=False))
    assert len(found.reasons) >= left_out - (not {**ALL, **changes}["is_closing"])
