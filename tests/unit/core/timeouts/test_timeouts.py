"""The calculation: longest interval, maximum over ranks, safety factor, floor, moving average."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.timeouts.in_force import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.core.timeouts.over_all_ranks import (
    NO_OBSERVATION,
    Calculation,
    NotReady,
    Rule,
    calculate_heartbeats,
    calculate_sections,
)

RULE = Rule(safety_factor=5.0, floor=0.0)


def alone(values: Sequence[float]) -> tuple[list[float], list[int]]:
    return list(values), [0] * len(values)


def other_rank_has(*others: float) -> object:
    """Rank 3, in which nothing goes on."""

    def maximum(values: Sequence[float]) -> tuple[list[float], list[int]]:
        pairs = [max((v, 0), (o, 3)) for v, o in zip(values, [*others, *others], strict=True)]
        return [p[0] for p in pairs], [p[1] for p in pairs]

    return maximum


def test_a_configured_value_is_replaced_and_a_calculated_one_averaged() -> None:
    old = SectionTimeouts({"step": 100.0, "ckpt": None})
    new, how = calculate_sections({"step": 2.0}, old, RULE, alone)  # type: ignore[misc]
    assert new.section == {"step": 10.0, "ckpt": None}
    assert new.calculated_sections == {"step"}
    assert how["step"] == Calculation(timeout_s=10.0, previous_s=100.0, max_observed_s=2.0, rank_of_max=0)
    again, _ = calculate_sections({"step": 4.0}, new, RULE, alone)  # type: ignore[misc]
    assert again.section["step"] == (10.0 + 20.0) / 2


def test_the_maximum_over_ranks_counts_and_its_rank_is_known() -> None:
    new, how = calculate_sections(  # type: ignore[misc]
        {"a": 1.0, "b": 2.0, OUT_OF_SECTION: NO_OBSERVATION},
        SectionTimeouts({"a": None, "b": None}),
        RULE,
        other_rank_has(3.0, 1.0, 0.5),  # type: ignore[arg-type]
    )
    assert new.section == {"a": 15.0, "b": 10.0}
    assert new.out_of_section == 2.5
    assert new.is_out_of_section_calculated
    assert new.were_calculated
    assert {name: c.rank_of_max for name, c in how.items()} == {"a": 3, "b": 0, OUT_OF_SECTION: 3}


def test_calculation_without_an_observation_is_not_ready_and_changes_nothing() -> None:
    old = SectionTimeouts({"a": 1.0})
    result = calculate_sections({"a": NO_OBSERVATION}, old, RULE, alone)
    assert result == NotReady(["a"])
    assert old.section == {"a": 1.0}


def test_a_section_that_nobody_has_closed_is_not_ready_however_old_it_is() -> None:
    old = SectionTimeouts({"epoch": None, "step": 60.0})
    observed = {"epoch": NO_OBSERVATION, "step": 0.05}
    assert calculate_sections(observed, old, RULE, alone, {"epoch": 100.0}) == NotReady(["epoch"])
    assert calculate_sections(observed, old, RULE, other_rank_has(NO_OBSERVATION, 1.0)) == NotReady(["epoch"])  # type: ignore[arg-type]


def test_section_that_is_open_and_was_never_closed_can_be_left_out_the_same_on_all_ranks() -> None:
    old = SectionTimeouts({"setup": 600.0, "step": 60.0})
    observed = {"setup": NO_OBSERVATION, "step": 0.5}

    def open_on_rank_3(values: Sequence[float]) -> tuple[list[float], list[int]]:
        return [*values[:2], 9.0, values[3]], [0, 0, 3, 0]

    for going_on, found in (({"setup": 9.0}, alone), ({}, open_on_rank_3)):
        new, how = calculate_sections(observed, old, RULE, found, going_on, leaves_out_open=True)  # type: ignore[misc]
        assert new.section == {"setup": 600.0, "step": 2.5}
        assert (new.calculated_sections, how.keys()) == ({"step"}, {"step"})
    assert calculate_sections(observed, old, RULE, alone, leaves_out_open=True) == NotReady(["setup"])
    no_step = {"setup": NO_OBSERVATION, "step": NO_OBSERVATION, OUT_OF_SECTION: NO_OBSERVATION}
    going_on = {"setup": 9.0, OUT_OF_SECTION: 2.0}
    not_ready = calculate_sections(no_step, old, RULE, alone, going_on, leaves_out_open=True)
    assert not_ready == NotReady(["step", OUT_OF_SECTION])
    alone_open = calculate_sections({"setup": NO_OBSERVATION}, old, RULE, alone, {"setup": 9.0}, leaves_out_open=True)
    assert alone_open == (old, {})


def test_the_age_of_an_open_section_counts_beside_a_closed_one_of_any_rank() -> None:
    old = SectionTimeouts({"epoch": None})
    for observed in (2.0, NO_OBSERVATION):
        new, how = calculate_sections({"epoch": observed}, old, RULE, other_rank_has(3.0), {"epoch": 4.0})  # type: ignore[misc,arg-type]
        assert new.section["epoch"] == 20.0
        assert (how["epoch"].max_observed_s, how["epoch"].rank_of_max) == (4.0, 0)


@pytest.mark.parametrize("factor", [1.0, 1.2, 1.9])
def test_the_mean_is_never_below_what_was_just_seen(factor: float) -> None:
    old = SectionTimeouts({"a": 1.0}, calculated_sections={"a"})
    new, _ = calculate_sections({"a": 100.0}, old, Rule(factor, 0.0), alone)  # type: ignore[misc]
    assert new.section["a"] == 100.0
    new, _ = calculate_sections({"a": 0.5}, old, Rule(factor, 0.0), alone)  # type: ignore[misc]
    assert new.section["a"] == (1.0 + 0.5 * factor) / 2


def test_calculated_timeout_below_the_floor_is_enforced_at_the_floor() -> None:
    mixed = SectionTimeouts({"a": 0.1, "b": 0.2, "c": None, "d": 9.0}, 0.3, {"a", "d"}, True)
    assert mixed.enforced(5.0) == SectionTimeouts({"a": 5.0, "b": 0.2, "c": None, "d": 9.0}, 5.0, {"a", "d"}, True)
    assert mixed.section["a"] == 0.1
    configured = SectionTimeouts({"a": 0.1}, 0.3)
    assert configured.enforced(5.0) == configured
    assert HeartbeatTimeouts(0.1, 9.0, True).enforced(5.0) == HeartbeatTimeouts(5.0, 9.0, True)
    assert HeartbeatTimeouts(0.1, None, False).enforced(5.0) == HeartbeatTimeouts(0.1, None, False)


def test_the_state_may_hold_the_configured_values_for_who_takes_it_for_all_there_are() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0, "c": None}, 4.0, {"a"}, False)
    state = state_to_dict(None, sections, with_configured=True)["current_timeouts"]["section"]
    assert SectionTimeouts(**state) == sections
    assert state_from_dict({"current_timeouts": {"section": state}}) == (None, {"a": 3.0}, None)


def test_the_floor_is_the_least_value() -> None:
    new, _ = calculate_sections({"a": 0.02}, SectionTimeouts({"a": None}), Rule(5.0, 5.0), alone)  # type: ignore[misc]
    assert new.section["a"] == 5.0


def test_heartbeat_timeouts_are_calculated_then_averaged() -> None:
    new, _ = calculate_heartbeats(  # type: ignore[misc]
        {"initial": 3.0, "subsequent": 1.0}, HeartbeatTimeouts(3600.0, 2700.0, False), RULE, alone
    )
    assert new == HeartbeatTimeouts(15.0, 5.0, True)
    again, _ = calculate_heartbeats({"initial": 5.0, "subsequent": 3.0}, new, RULE, alone)  # type: ignore[misc]
    assert again == HeartbeatTimeouts(20.0, 10.0, True)
    not_ready = calculate_heartbeats({"initial": 3.0, "subsequent": NO_OBSERVATION}, new, RULE, alone)
    assert not_ready == NotReady(["subsequent"])


def test_the_state_holds_calculated_values_only_and_survives_json() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0}, 4.0, {"a"}, False)
    state = json.loads(json.dumps(state_to_dict(HeartbeatTimeouts(1.0, 2.0, True), sections)))
    read = state_from_dict(state)
    assert read == ((1.0, 2.0), {"a": 3.0}, None)
    assert state_from_dict(state_to_dict(HeartbeatTimeouts(1.0, 2.0, False), SectionTimeouts({"a": 3.0}))) == (
        None,
        {},
        None,
    )
    assert state_from_dict({}) == (None, {}, None)


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"current_timeouts": 3},
        {"current_timeouts": {"heartbeat": {"initial": -1, "subsequent": 2, "were_calculated": True}}},
        {"current_timeouts": {"heartbeat": {"initial": 1, "were_calculated": True}}},
        {"current_timeouts": {"section": {"section": {"a": "3"}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"section": {}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"section": {"a": float("nan")}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"section": {"a": True}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"section": [], "calculated_sections": 4}}},
        {"current_timeouts": {"section": {"is_out_of_section_calculated": True}}},
    ],
)
def test_a_state_that_is_none_is_refused(state: object) -> None:
    with pytest.raises(ConfigError):
        state_from_dict(state)  # type: ignore[arg-type]


def test_timeouts_are_valid_once_they_are_complete() -> None:
    assert not HeartbeatTimeouts().are_valid
    assert HeartbeatTimeouts(1, 2).are_valid
    assert not SectionTimeouts({"a": 1.0}).are_valid
    assert not SectionTimeouts({"a": None}, 1.0).are_valid
    assert SectionTimeouts({"a": 1.0}, 1.0).are_valid
    assert not SectionTimeouts({"a": 1.0}, 1.0, {"a"}).were_calculated
    assert SectionTimeouts({"a": 1.0}, 1.0, ["a"], True).were_calculated  # type: ignore[arg-type]
