"""The rule for learned timeouts, and the conditions under which they are learned."""

from __future__ import annotations

import pytest

from megatron_ft.core.board.layout import FACT_ASYNC_SAVES, FACT_ENOUGH_STEPS, FACT_LOADED
from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN
from megatron_ft.learning.rule import calculate, facts_of, reasons_against
from megatron_ft.learning.state import Configured, LearnedState, LearnedTimeout
from tests.bench.rules import PATTERNS, survives


@pytest.mark.parametrize("name", PATTERNS)
def test_healthy_pattern_ends_no_rank(name: str) -> None:
    section, seen_s, next_s, told = PATTERNS[name]
    assert survives(section, seen_s, next_s, told=told)


def test_timeout_is_five_times_the_longest_interval_averaged_with_the_one_before() -> None:
    assert calculate(20.0, None, 5.0) == 100.0
    assert calculate(40.0, 100.0, 5.0) == 150.0
    assert calculate(1.0, 150.0, 5.0) == 77.5


def learned(name: str, calculated_s: float, longest_s: float) -> LearnedState:
    return LearnedState().with_timeouts({name: LearnedTimeout(calculated_s=calculated_s, max_observed_s=longest_s)})


def in_force(name: str, calculated_s: float, longest_s: float) -> float:
    """The timeout with a floor of a minute."""
    return learned(name, calculated_s, longest_s).in_force(60.0)[name]


@pytest.mark.parametrize("factor", [0.1, 1.0, 5.0])
def test_timeout_is_never_below_125_percent_of_the_longest_interval(factor: float) -> None:
    assert calculate(400.0, 5.0, factor) >= 500.0
    assert in_force("step", 5.0, 400.0) == 500.0


@pytest.mark.parametrize(
    ("name", "timeout_s"), [("step", 60.0), ("checkpointing", 60.0), ("out_of_section", 60.0), ("setup", 240.0)]
)
def test_interval_of_a_fraction_of_a_millisecond_makes_no_timeout_below_the_floor(name: str, timeout_s: float) -> None:
    assert in_force(name, calculate(0.0002, None, 5.0), 0.0002) == timeout_s
    assert in_force(name, 1000.0, 200.0) == 1000.0


@pytest.mark.parametrize(
    ("longest_s", "configured_s", "doubled_s"),
    [(15.0, None, 150.0), (15.0, 100.0, 100.0), (15.0, 70.0, 75.0), (0.0, 70.0, 150.0)],
    ids=["unbounded", "up to the configured one", "never below what was learned", "a client has calculated it"],
)
def test_doubled_timeout_goes_up_to_the_configured_one(
    longest_s: float, configured_s: float | None, doubled_s: float
) -> None:
    configured = Configured(rank_section_timeouts={"step": configured_s})
    state = learned("step", 75.0, longest_s).doubled("step", 75.0, configured)
    assert state.in_force(60.0) == {"step": doubled_s}
    assert LearnedState().doubled("step", 1e9, configured).in_force(60.0) == {"step": 1e9}


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


def test_facts_of_a_script_that_learns_itself_are_the_same() -> None:
    none = dict.fromkeys(("loaded", "setup_open", "enough_steps", "saved", "async_saves"), False)
    assert facts_of(**none) == 0
    assert facts_of(**{**none, "loaded": True, "enough_steps": True, "saved": True}) == ALL
    assert facts_of(**{**none, "setup_open": True, "async_saves": True}) == FACT_SETUP_OPEN | FACT_ASYNC_SAVES
