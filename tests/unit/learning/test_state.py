"""What was learned: the file in all its versions, and what applies when the configuration was changed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_ft.errors import ConfigError
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.state import (
    Configured,
    Heartbeats,
    LearnedState,
    LearnedTimeout,
    UnusableStateError,
    parse,
    that_applies,
)
from megatron_ft.learning.timeouts import HeartbeatTimeouts, SectionTimeouts, state_from_dict, state_to_dict

SECTIONS: dict[str, float | None] = {"setup": 600.0, "step": 180.0}
CONFIGURED = Configured(rank_section_timeouts=SECTIONS, rank_out_of_section_timeout=300.0)
NOTHING = Configured()
LEARNED = {"checkpointing": 10.0, "setup": 11.0, "step": 12.0, "out_of_section": 20.0}
SCHEMA = "megatron_ft.ft_state"


def learned(timeouts: dict[str, float] = LEARNED, **changes: Any) -> LearnedState:
    entries = {name: LearnedTimeout(calculated_s=value) for name, value in timeouts.items()}
    return LearnedState(**{"configured_s": CONFIGURED, **changes}).with_timeouts(entries)


def with_section(name: str, value: float | None) -> Configured:
    return replace(CONFIGURED, rank_section_timeouts={**SECTIONS, name: value})


def values_of(state: LearnedState) -> dict[str, float]:
    return {name: each.calculated_s for name, each in state.timeouts.items()}


# -- the rule, applied ------------------------------------------------------------------------------------------


def test_learning_replaces_nothing_that_was_not_seen_and_averages_what_was() -> None:
    state = learned({"step": 50.0, "setup": 300.0}).doubled("step", 50.0, NOTHING)
    after = state.learn({"step": Observed(50, 40.0, 7)}, 5.0)
    assert values_of(after) == {"step": 150.0, "setup": 300.0}
    assert (after.timeouts["step"].max_observed_s, after.timeouts["step"].rank_of_max) == (40.0, 7)


# -- which apply ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "changed"),
    [
        pytest.param(CONFIGURED, None, id="as_it_was"),
        pytest.param(Configured(rank_section_timeouts={"setup": 600.0}), None, id="no_longer_set"),
        pytest.param(with_section("checkpointing", None), None, id="set_to_null_that_was_absent"),
        pytest.param(with_section("checkpointing", 99.0), "checkpointing", id="set_for_the_first_time"),
        pytest.param(with_section("step", 200.0), "step", id="raised"),
        pytest.param(with_section("step", None), "step", id="set_to_null"),
        pytest.param(replace(CONFIGURED, rank_out_of_section_timeout=301.0), "out_of_section", id="out_of_section"),
        pytest.param(replace(CONFIGURED, rank_out_of_section_timeout=None), "out_of_section", id="out_of_section_null"),
    ],
)
def test_learned_timeout_applies_unless_its_configured_value_was_changed_since(
    configured: Configured, changed: str | None
) -> None:
    state, superseded = that_applies(learned(), configured)
    assert values_of(state) == {name: timeout for name, timeout in LEARNED.items() if name != changed}
    assert [*superseded] == ([] if changed is None else [changed])
    assert values_of(that_applies(learned(configured_s=None), configured)[0]) == LEARNED


def test_configured_timeout_that_wins_is_told_with_what_it_was() -> None:
    _, superseded = that_applies(learned(), with_section("step", None))
    line = "it was changed (from 180 s) since 12 s was learned"
    assert superseded["step"] == f"'step' keeps its configured timeout of infinity: {line}"


def test_heartbeats_are_kept_as_a_pair() -> None:
    pair = Heartbeats(50.0, 5.0)
    state = learned(heartbeats=pair, configured_s=Configured(rank_heartbeat_timeout=100.0))
    for now_s, beats in ((100.0, pair), (90.0, None)):
        assert that_applies(state, Configured(rank_heartbeat_timeout=now_s))[0].heartbeats == beats


# -- the file ---------------------------------------------------------------------------------------------------

seconds = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
names = st.text(min_size=1, max_size=20)
entries = st.builds(
    LearnedTimeout, calculated_s=seconds, max_observed_s=seconds, rank_of_max=st.none() | st.integers(0, 1 << 20)
)
states = st.builds(
    LearnedState,
    sections=st.dictionaries(names, entries, max_size=5),
    out_of_section=st.none() | entries,
    heartbeats=st.none() | st.builds(Heartbeats, seconds, seconds),
    configured_s=st.none()
    | st.builds(
        Configured,
        rank_section_timeouts=st.dictionaries(names, st.none() | seconds),
        rank_out_of_section_timeout=st.just(msgspec.UNSET) | st.none() | seconds,
    ),
    world_size=st.none() | st.integers(1, 1 << 20),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def document_of(state: LearnedState, configured: Configured = NOTHING) -> Any:
    return json.loads(json.dumps(state.document(configured, 60.0), allow_nan=False))


@given(states)
def test_the_round_trip_is_exact(state: LearnedState) -> None:
    assert parse(document_of(state)) == state


def parsed(document: Any) -> LearnedState | None:
    """None if it is refused, in one line."""
    line = ""
    try:
        return parse(document)
    except ConfigError as error:
        line = str(error)
    assert "\n" not in line
    return None


@given(states, st.data())
def test_document_with_any_value_in_any_place_is_read_or_refused(state: LearnedState, data: st.DataObject) -> None:
    document = document_of(state)
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place, key = place[key], data.draw(st.sampled_from(sorted(place[key])))
    place[key] = data.draw(values)
    result = parsed(document)
    if result is not None:
        assert all(60.0 <= timeout_s <= 1e11 for timeout_s in result.in_force(60.0).values())


def test_state_of_the_reference_is_read() -> None:
    plain = state_to_dict(HeartbeatTimeouts(50.0, 5.0, True), SectionTimeouts({"step": 9.0}, 7.0, {"step"}, True))
    state = parse(json.loads(json.dumps(plain)))
    assert (values_of(state), state.heartbeats, state.configured_s) == (
        {"step": 9.0, "out_of_section": 7.0},
        Heartbeats(50.0, 5.0),
        None,
    )
    assert parse(state_to_dict(None, None)) == LearnedState()


@pytest.mark.parametrize(("version", "calculated_s"), [(1, 9.0), (2, 50.0), (3, 100.0)])
def test_document_of_an_earlier_version_is_read_with_what_its_rule_had_calculated(
    version: int, calculated_s: float
) -> None:
    entry = {"timeout_s": 9.0, "previous_s": None, "max_observed_s": 1.8, "rank_of_max": 3, "first_timeout_s": 60.0}
    entry |= {"raised": 2.0} if version == 3 else {}
    document = {
        "schema": SCHEMA,
        "schema_version": version,
        "sections": {"step": entry},
        "out_of_section": {"timeout_s": 20.0},
        "seen": {"step": {"counts": {"80": 99.0}, "reference_s": 50.0}} if version > 1 else None,
    }
    state = parse(document)
    assert (values_of(state), state.raised) == ({"step": calculated_s, "out_of_section": 20.0}, {})
    assert state.timeouts["step"] == LearnedTimeout(calculated_s=calculated_s, max_observed_s=1.8, rank_of_max=3)


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([], "holds no learned timeouts"),
        ({}, "holds no learned timeouts"),
        ({"schema": "x"}, "schema is 'x'"),
        ({"schema": SCHEMA}, "version None"),
        ({"schema": SCHEMA, "schema_version": 5, "sections": 7}, "newer than 4"),
        ({"schema": SCHEMA, "schema_version": 4, "sections": []}, "Expected `object`, got `array` - at `$.sections`"),
        ({"schema": SCHEMA, "schema_version": 4, "sections": {"step": {}}}, "calculated_s"),
        ({"schema": SCHEMA, "schema_version": 1, "sections": {"step": {"timeout_s": -2}}}, "> 0"),
        ({"schema": SCHEMA, "schema_version": 4, "sections": {}, "raised": {"step": "x"}}, "$.raised"),
    ],
)
def test_broken_document_is_refused_with_a_reason(document: Any, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(document)
    assert what in str(error.value)
    assert isinstance(error.value, UnusableStateError) == ("newer" in what)


def test_file_has_all_timeouts_in_the_form_of_the_reference() -> None:
    state = learned({"step": 90.0}, heartbeats=Heartbeats(50.0, 5.0))
    document = document_of(state.doubled("heartbeat", 50.0, NOTHING), CONFIGURED)
    assert parse(document) == state
    assert document["current_timeouts"] == {
        "heartbeat": {"initial": 50.0, "subsequent": 5.0, "were_calculated": True},
        "section": {
            "section": {"setup": 600.0, "step": 90.0},
            "out_of_section": 300.0,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }
    heartbeats, sections = state_from_dict(document)
    assert (heartbeats, sections.calculated) == (HeartbeatTimeouts(50.0, 5.0, True), {"step": 90.0})


def test_file_of_the_schema_of_today_is_read() -> None:
    entry = {"calculated_s": 9.0, "max_observed_s": 1.8, "rank_of_max": 3}
    document = {
        "schema": SCHEMA,
        "schema_version": 4,
        "written_at_utc": "2026-11-28T03:26:21+00:00",
        "written_at_unix_s": 1795836381.0,
        "world_size": 8,
        "sections": {"step": entry},
        "out_of_section": {"calculated_s": 20.0, "max_observed_s": 4.0, "rank_of_max": None},
        "heartbeats": {"initial_s": 50.0, "subsequent_s": 5.0},
        "raised": {"step": 2.0},
        "configured_s": {"rank_section_timeouts": {"step": None}, "rank_heartbeat_timeout": 45.0},
        "current_timeouts": {},
    }
    state = parse(document)
    assert (values_of(state), state.world_size) == ({"step": 18.0, "out_of_section": 20.0}, 8)
    assert state.configured_s == Configured(rank_section_timeouts={"step": None}, rank_heartbeat_timeout=45.0)
    assert state.heartbeats == Heartbeats(50.0, 5.0)
