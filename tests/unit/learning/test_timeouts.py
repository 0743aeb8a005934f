"""Timeouts of a client, and the collective calculation over all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.learning.rule import NO_OBSERVATION, calculate_over_ranks
from megatron_ft.learning.timeouts import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    state_from_dict,
    state_to_dict,
)


def alone(values: Sequence[float]) -> list[float]:
    return list(values)


def with_rank_3(*others: float) -> Any:
    """Rank 3, which has seen these, and has the same age open."""
    return lambda values: [max(pair) for pair in zip(values, [*others, *others], strict=True)]


def calculated(
    ended: dict[str, float], maximum: Any = alone, *, factor: float = 5.0, **more: Any
) -> dict[str, float] | list[str]:
    """The timeouts, or the names of those that aren't ready."""
    more = {"going_on": {}, "previous": {}, **more}
    going_on, previous = more.pop("going_on"), more.pop("previous")
    found, missing = calculate_over_ranks(ended, ended, going_on, previous, factor, maximum, **more)
    return missing or found


def read(state: dict[str, Any]) -> tuple[HeartbeatTimeouts | None, dict[str, float | None]]:
    heartbeats, sections = state_from_dict(state)
    return heartbeats, sections.calculated


def test_a_configured_value_is_replaced_and_a_calculated_one_averaged() -> None:
    old = SectionTimeouts({"step": 100.0, "ckpt": None})
    assert old.calculated == {}
    first = calculated({"step": 2.0}, previous=old.calculated)
    assert first == {"step": 10.0}
    new = old.with_calculated({"step": 10.0})
    assert (new.section, new.calculated_sections) == ({"step": 10.0, "ckpt": None}, {"step"})
    assert calculated({"step": 4.0}, previous=new.calculated) == {"step": (10.0 + 20.0) / 2}


def test_the_maximum_over_ranks_counts() -> None:
    found = calculated({"a": 1.0, "b": 2.0, OUT_OF_SECTION: NO_OBSERVATION}, with_rank_3(3.0, 1.0, 0.5))
    assert found == {"a": 15.0, "b": 10.0, OUT_OF_SECTION: 2.5}
    assert isinstance(found, dict)
    new = SectionTimeouts({"a": None, "b": None}).with_calculated(found)
    assert (new.out_of_section, new.is_out_of_section_calculated, new.were_calculated) == (2.5, True, True)


def test_a_section_that_nobody_has_closed_is_not_ready_however_old_it_is() -> None:
    ended = {"epoch": NO_OBSERVATION, "step": 0.05}
    assert calculated(ended, going_on={"epoch": 100.0}) == ["epoch"]
    assert calculated(ended, with_rank_3(NO_OBSERVATION, 1.0)) == ["epoch"]


def test_section_that_is_open_and_was_never_closed_can_be_left_out_the_same_on_all_ranks() -> None:
    ended = {"setup": NO_OBSERVATION, "step": 0.5}
    assert calculated(ended, going_on={"setup": 9.0}, leaves_out_open=True) == {"step": 2.5}
    assert calculated(ended, lambda v: [*v[:2], 9.0, v[3]], leaves_out_open=True) == {"step": 2.5}
    assert calculated(ended, leaves_out_open=True) == ["setup"]
    none = {"setup": NO_OBSERVATION, "step": NO_OBSERVATION, OUT_OF_SECTION: NO_OBSERVATION}
    going_on = {"setup": 9.0, OUT_OF_SECTION: 2.0}
    assert calculated(none, going_on=going_on, leaves_out_open=True) == ["step", OUT_OF_SECTION]


def test_the_age_of_an_open_section_counts_beside_a_closed_one_of_any_rank() -> None:
    for ended in (2.0, NO_OBSERVATION):
        assert calculated({"epoch": ended}, with_rank_3(3.0), going_on={"epoch": 4.0}) == {"epoch": 20.0}


def test_calculated_timeout_below_the_floor_is_enforced_at_the_floor() -> None:
    mixed = SectionTimeouts({"a": 0.1, "b": 0.2, "c": None, "d": 9.0}, 0.3, {"a", "d"}, True)
    assert mixed.enforced(5.0) == SectionTimeouts({"a": 5.0, "b": 0.2, "c": None, "d": 9.0}, 5.0, {"a", "d"}, True)
    assert mixed.section["a"] == 0.1
    setup = SectionTimeouts({"setup": 0.1}, calculated_sections={"setup"})
    assert setup.enforced(5.0).section == {"setup": 20.0}
    configured = SectionTimeouts({"a": 0.1}, 0.3)
    assert configured.enforced(5.0) == configured
    assert HeartbeatTimeouts(0.1, 9.0, True).enforced(5.0) == HeartbeatTimeouts(5.0, 9.0, True)
    assert HeartbeatTimeouts(0.1, None, False).enforced(5.0) == HeartbeatTimeouts(0.1, None, False)


def test_the_state_may_hold_the_configured_values_for_who_takes_it_for_all_there_are() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0, "c": None}, 4.0, {"a"}, False)
    state = state_to_dict(None, sections, with_configured=True)["current_timeouts"]["section"]
    assert SectionTimeouts(**state) == sections
    assert read({"current_timeouts": {"section": state}}) == (None, {"a": 3.0})


def test_heartbeat_timeouts_are_calculated_then_averaged() -> None:
    assert calculated({"initial": 3.0, "subsequent": 1.0}) == {"initial": 15.0, "subsequent": 5.0}
    previous = {"initial": 15.0, "subsequent": 5.0}
    assert calculated({"initial": 5.0, "subsequent": 3.0}, previous=previous) == {"initial": 20.0, "subsequent": 10.0}
    assert calculated({"initial": 3.0, "subsequent": NO_OBSERVATION}) == ["subsequent"]


def test_the_state_holds_calculated_values_only_and_survives_json() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0}, 4.0, {"a"}, False)
    state = json.loads(json.dumps(state_to_dict(HeartbeatTimeouts(1.0, 2.0, True), sections)))
    assert read(state) == (HeartbeatTimeouts(1.0, 2.0, True), {"a": 3.0})
    configured = state_to_dict(HeartbeatTimeouts(1.0, 2.0, False), SectionTimeouts({"a": 3.0}))
    assert read(configured) == read({}) == (None, {})


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
