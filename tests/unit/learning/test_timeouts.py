"""Timeouts of a client, and the form in which they are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.learning.timeouts import (
    HeartbeatTimeouts,
    SectionTimeouts,
    state_from_dict,
    state_to_dict,
)


def read(state: dict[str, Any]) -> tuple[HeartbeatTimeouts | None, dict[str, float | None]]:
    heartbeats, sections = state_from_dict(state)
    return heartbeats, sections.calculated


def test_the_state_may_hold_the_configured_values_for_who_takes_it_for_all_there_are() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0, "c": None}, 4.0, {"a"}, False)
    state = state_to_dict(None, sections)["current_timeouts"]["section"]
    assert SectionTimeouts(**state) == sections
    assert read({"current_timeouts": {"section": state}}) == (None, {"a": 3.0})


def test_state_is_read_with_its_calculated_values_only_and_survives_json() -> None:
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
