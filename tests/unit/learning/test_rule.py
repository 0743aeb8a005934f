"""The rule for learned timeouts, the conditions under which they are learned, and what of them is in force."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Arm
from megatron_ft.learning.rule import calculate, reasons_against, with_armed
from megatron_ft.learning.timeouts import LearnedState
from megatron_ft.link.base.layout import (
    FACT_ASYNC_SAVES,
    FACT_ENOUGH_STEPS,
    FACT_LOADED,
    FLAG_ARE_LEARNED,
    ArmedTimeout,
    SectionView,
)
from tests.bench.rules import PATTERNS, survives
from tests.fuzz.healthy import BOARD


@pytest.mark.parametrize("name", PATTERNS)
def test_healthy_pattern_ends_no_rank(name: str) -> None:
    section, seen_s, next_s, told = PATTERNS[name]
    assert survives(section, seen_s, next_s, told=told)


@pytest.mark.parametrize(
    ("longest_s", "before_s", "factor", "timeout_s"),
    [(20.0, None, 5.0, 100.0), (40.0, 100.0, 5.0, 150.0), (1.0, 150.0, 5.0, 77.5), (400.0, 5.0, 0.1, 500.0)],
)
def test_timeout_is_five_times_the_longest_interval_averaged_with_the_one_before_and_above_that_interval(
    longest_s: float, before_s: float | None, factor: float, timeout_s: float
) -> None:
    assert calculate(longest_s, before_s, factor) == timeout_s


@pytest.mark.parametrize(
    ("configured_s", "doubled_s"),
    [(None, 150.0), (100.0, 100.0), (75.0, 75.0), (70.0, 150.0)],
    ids=["unbounded", "up to the configured one", "not beyond it", "the configured one is shorter anyway"],
)
def test_doubled_timeout_goes_up_to_the_configured_one(configured_s: float | None, doubled_s: float) -> None:
    state = LearnedState(timeouts={"step": 75.0}).doubled("step", 75.0, {"step": configured_s})
    assert state.timeouts == {"step": doubled_s}
    assert LearnedState().doubled("step", 9e8, {}).timeouts == {"step": 1e9}


ALL = FACT_LOADED | FACT_ENOUGH_STEPS | FACT_SAVED


@pytest.mark.parametrize(
    ("facts", "is_closing", "names"),
    [
        (ALL, True, ["setup", "step", "checkpointing", "out_of_section"]),
        (ALL, False, ["setup", "step", "checkpointing"]),
        (ALL & ~FACT_LOADED, True, ["step", "checkpointing"]),
        (ALL | FACT_SETUP_OPEN, True, ["step", "checkpointing"]),
        (ALL & ~FACT_ENOUGH_STEPS, True, ["setup", "checkpointing"]),
        (ALL & ~FACT_SAVED, True, ["setup", "step"]),
        (ALL | FACT_ASYNC_SAVES, True, ["setup", "step", "out_of_section"]),
    ],
)
def test_conditions_are_those_of_megatrons_modules(facts: int, is_closing: bool, names: list[str]) -> None:
    reasons = reasons_against(facts, is_closing=is_closing)
    assert [name for name, reason in reasons.items() if not reason] == names
    assert all("isn't learned" in reason or "is learned" in reason for reason in reasons.values() if reason)


# -- what is in force on a board --------------------------------------------------------------------------------

S = 1_000_000_000
STEP = SectionView("step", 0, 0, None)
STRAY = ArmedTimeout(1, enforced=False)


@pytest.mark.parametrize(
    ("own", "enforced", "armed"),
    [
        ({}, False, ArmedTimeout(5 * S, enforced=False)),
        ({"name": "other"}, True, None),
        ({"own_timeout_ns": 60 * S}, True, ArmedTimeout(5 * S)),
        ({"own_timeout_ns": 60 * S}, False, None),
        # a calculated one is only replaced by a longer one, which is enforced
        ({"own_timeout_ns": 4 * S, "is_calculated": True}, True, ArmedTimeout(5 * S)),
        ({"own_timeout_ns": 4 * S, "is_calculated": True}, False, ArmedTimeout(5 * S)),
        ({"own_timeout_ns": 8 * S, "is_calculated": True}, True, None),
    ],
)
def test_learned_timeout_is_armed_beside_the_own_one_of_a_section(
    own: dict[str, Any], enforced: bool, armed: ArmedTimeout | None
) -> None:
    (step,) = with_armed(Arm(0, {"step": 5.0}, enforced), BOARD._replace(sections=(STEP._replace(**own),))).sections
    assert step.armed == armed


def test_time_out_of_section_and_calculated_heartbeats_are_armed_too() -> None:
    arm = Arm(0, {"out_of_section": 5.0, "heartbeat": 6.0, "initial_heartbeat": 20.0})
    own = BOARD._replace(
        own_out_of_section_timeout_ns=None, own_heartbeat_timeout_ns=3 * S, own_initial_heartbeat_timeout_ns=5 * S
    )
    found = with_armed(arm, own)
    assert (found.armed_out_of_section, found.out_of_section_timeout_ns) == (ArmedTimeout(5 * S), 5 * S)
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (3 * S, 5 * S)
    found = with_armed(arm, own._replace(heartbeat_flags=FLAG_ARE_LEARNED))
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (6 * S, 20 * S)
    calculated = BOARD._replace(own_out_of_section_timeout_ns=8 * S, is_out_of_section_calculated=True)
    assert with_armed(arm, calculated).out_of_section_timeout_ns == 8 * S


@pytest.mark.parametrize(
    ("arm", "watch_only"), [(None, False), (Arm(0), False), (Arm(0, {"step": 5.0, "out_of_section": 5.0}), True)]
)
def test_stray_words_and_ranks_without_hooks_are_not_armed(arm: Arm | None, watch_only: bool) -> None:
    plain = BOARD._replace(sections=(STEP,), watch_only=watch_only)
    strayed = plain._replace(
        sections=(STEP._replace(armed=STRAY),),
        armed_out_of_section=STRAY,
        armed_heartbeat_ns=1,
        armed_initial_heartbeat_ns=1,
    )
    assert with_armed(arm, strayed) == plain
