"""The rule for learned timeouts, the conditions under which they are learned, and what of them is in force."""

from __future__ import annotations

import pytest

from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Arm
from megatron_ft.learning.rule import calculate, reasons_against, with_armed
from megatron_ft.learning.timeouts import LearnedState, floored
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


def test_timeout_is_five_times_the_longest_interval_averaged_with_the_one_before() -> None:
    assert calculate(20.0, None, 5.0) == 100.0
    assert calculate(40.0, 100.0, 5.0) == 150.0
    assert calculate(1.0, 150.0, 5.0) == 77.5


@pytest.mark.parametrize("factor", [0.1, 1.0, 5.0])
def test_timeout_is_never_below_125_percent_of_the_longest_interval(factor: float) -> None:
    assert calculate(400.0, 5.0, factor) >= 500.0


@pytest.mark.parametrize(
    ("name", "timeout_s"), [("step", 60.0), ("checkpointing", 60.0), ("out_of_section", 60.0), ("setup", 240.0)]
)
def test_interval_of_a_fraction_of_a_millisecond_makes_no_timeout_below_the_floor(name: str, timeout_s: float) -> None:
    assert floored({name: calculate(0.0002, None, 5.0)}, 60.0) == {name: timeout_s}
    assert floored({name: 1000.0}, 60.0) == {name: 1000.0}


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
LEARNED = 5.0
STRAY = ArmedTimeout(1, enforced=False)


def armed_step(arm: Arm | None, step: SectionView = STEP) -> ArmedTimeout | None:
    (found,) = with_armed(arm, BOARD._replace(sections=(step,))).sections
    return found.armed


@pytest.mark.parametrize("enforced", [True, False])
def test_a_section_without_a_timeout_gets_the_learned_one(enforced: bool) -> None:
    arm = Arm(0, {"step": LEARNED, "save": LEARNED}, enforced)
    assert armed_step(arm) == ArmedTimeout(5 * S, enforced)
    assert armed_step(arm, STEP._replace(name="other")) is None


def test_an_enforced_timeout_replaces_a_configured_one_and_one_that_is_only_reported_does_not() -> None:
    configured = STEP._replace(own_timeout_ns=60 * S)
    assert armed_step(Arm(0, {"step": LEARNED}), configured) is not None
    assert armed_step(Arm(0, {"step": LEARNED}, enforced=False), configured) is None


@pytest.mark.parametrize("enforced", [True, False])
def test_a_calculated_timeout_is_only_replaced_by_a_longer_one_which_is_enforced(enforced: bool) -> None:
    calculated = STEP._replace(own_timeout_ns=4 * S, is_calculated=True)
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated) == ArmedTimeout(5 * S)
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated._replace(own_timeout_ns=8 * S)) is None
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated._replace(own_timeout_ns=None)) is None


def test_the_time_out_of_section_is_armed_under_its_name() -> None:
    found = with_armed(Arm(0, {"out_of_section": LEARNED}), BOARD._replace(own_out_of_section_timeout_ns=None))
    assert (found.armed_out_of_section, found.out_of_section_timeout_ns) == (ArmedTimeout(5 * S), 5 * S)
    calculated = BOARD._replace(own_out_of_section_timeout_ns=8 * S, is_out_of_section_calculated=True)
    assert with_armed(Arm(0, {"out_of_section": LEARNED}), calculated).out_of_section_timeout_ns == 8 * S


def test_heartbeat_timeouts_are_replaced_only_if_they_were_calculated() -> None:
    arm = Arm(0, {"heartbeat": 6.0, "initial_heartbeat": 20.0})
    own = BOARD._replace(own_heartbeat_timeout_ns=3 * S, own_initial_heartbeat_timeout_ns=5 * S)
    found = with_armed(arm, own._replace(heartbeat_flags=FLAG_ARE_LEARNED))
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (6 * S, 20 * S)
    found = with_armed(arm, own)
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (3 * S, 5 * S)


@pytest.mark.parametrize("arm", [None, Arm(0)])
def test_stray_words_arm_nothing(arm: Arm | None) -> None:
    strayed = BOARD._replace(
        sections=(STEP._replace(armed=STRAY),),
        armed_out_of_section=STRAY,
        armed_heartbeat_ns=1,
        armed_initial_heartbeat_ns=1,
    )
    assert with_armed(arm, strayed) == BOARD._replace(sections=(STEP,))


def test_a_rank_without_hooks_is_not_armed() -> None:
    found = with_armed(Arm(0, {"out_of_section": LEARNED}), BOARD._replace(watch_only=True))
    assert found.armed_out_of_section is None
