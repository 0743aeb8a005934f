"""The rule for learned timeouts, and the conditions under which they are learned."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.learning.messages import Observed
from megatron_ft.learning.rule import MOST_EXTENDED, Selection, calculate, in_force, select
from megatron_ft.learning.state import LearnedState

ALL = {
    "loaded": True,
    "setup_open": False,
    "enough_steps": True,
    "saved": True,
    "async_saves": False,
    "is_closing": True,
}


PATTERNS: dict[str, tuple[str, list[float], float, bool]] = {
    "many empty finalisations, then one of 40 s": ("checkpointing", [1.5], 40.0, False),
    "the first save takes 12 s": ("checkpointing", [], 12.0, False),
    "a file server stalls for 9 s": ("step", [0.1] * 5000, 9.0, False),
    "a file server stalls for 45 s": ("step", [0.1] * 5000, 45.0, False),
    "index of a data shard, 30 s": ("step", [4.0] * 200, 30.0, False),
    "a rollout of 320 s": ("step", [20.0, 60.0] * 50, 320.0, True),
    "longer sequences": ("step", [1.0] * 500, 8.0, False),
    "an evaluation inside the step": ("step", [2.0] * 100, 15.0, False),
    "a cold setup after a warm one": ("setup", [12.0], 90.0, False),
    "60 s of cold cache after a quick setup": ("setup", [2.0], 62.0, False),
    "a node compiles again for 50 s": ("step", [0.3] * 1000, 50.0, False),
    "export after the last save": ("out_of_section", [4.0] * 20, 59.0, False),
    "a larger save": ("checkpointing", [20.0] * 10, 99.0, False),
    "a save to a busy file system, seen waiting": ("checkpointing", [20.0] * 10, 380.0, True),
}
"""Healthy jobs: section, intervals so far, the next one, and whether a rank is seen to make progress in it."""


@pytest.mark.parametrize("name", PATTERNS)
def test_healthy_pattern_ends_no_rank(name: str) -> None:
    section, seen_s, next_s, told = PATTERNS[name]
    state = LearnedState()
    if seen_s:
        state = state.learn({section: Observed(1, max(seen_s))}, 5.0)
    timeout_s = state.in_force(60.0, {}).get(section, float("inf"))
    assert next_s <= (MOST_EXTENDED * timeout_s if told else timeout_s)


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
