"""Learned timeouts: the document, and which of them apply when the configuration was changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.timeouts.budget_rule import BUDGET, LEARNED_FLOOR_S, after_update
from megatron_ft.core.timeouts.exchange import Armed, Learned, LearnedTimeout, Moment
from megatron_ft.core.timeouts.ft_state_document import NewerStateError, file_document, parse, to_document
from megatron_ft.core.timeouts.in_force import HeartbeatTimeouts, SectionTimeouts, state_from_dict, state_to_dict
from megatron_ft.core.timeouts.known import Known, PastIntervals
from megatron_ft.core.timeouts.learned import (
    Choice,
    LearnedState,
    armed,
    choose,
    client_state_of,
    describe_difference,
    from_client,
    from_timeout,
    state_after,
    state_after_kill,
)
from megatron_ft.core.timeouts.sketch import Sketch
from megatron_ft.core.timeouts.tail import bucket_of

KNOWN = frozenset({"setup", "step", "checkpointing"})
CONFIGURED: dict[str, Any] = {
    "rank_section_timeouts": {"setup": 600.0, "step": 180.0},
    "rank_out_of_section_timeout": 300.0,
}


def learned(**changes: Any) -> LearnedState:
    values: dict[str, Any] = {
        "sections": {name: from_timeout(10.0 + i) for i, name in enumerate(sorted(KNOWN))},
        "out_of_section": from_timeout(20.0),
        "configured": CONFIGURED,
    }
    return LearnedState(**{**values, **changes})


def chosen(state: LearnedState, configured: dict[str, Any]) -> Choice:
    return choose(state, configured=configured, known_sections=KNOWN)


def with_section(name: str, value: float | None) -> dict[str, Any]:
    return {**CONFIGURED, "rank_section_timeouts": {**CONFIGURED["rank_section_timeouts"], name: value}}


# --- which apply ---


LEARNED = {"checkpointing": 10.0, "setup": 11.0, "step": 12.0, "out_of_section": 20.0}


@pytest.mark.parametrize(
    ("configured", "changed"),
    [
        pytest.param(CONFIGURED, None, id="as_it_was"),
        pytest.param({"rank_section_timeouts": {"setup": 600.0}}, None, id="no_longer_set"),
        pytest.param(with_section("checkpointing", None), None, id="set_to_null_that_was_absent"),
        pytest.param(with_section("checkpointing", 99.0), "checkpointing", id="set_for_the_first_time"),
        pytest.param(with_section("step", 200.0), "step", id="raised"),
        pytest.param(with_section("step", 179.999), "step", id="lowered_a_little"),
        pytest.param(with_section("step", None), "step", id="set_to_null"),
        pytest.param({**CONFIGURED, "rank_out_of_section_timeout": 301.0}, "out_of_section", id="out_of_section"),
        pytest.param({**CONFIGURED, "rank_out_of_section_timeout": None}, "out_of_section", id="out_of_section_null"),
    ],
)
def test_learned_timeout_applies_unless_its_configured_value_was_changed_since(
    configured: dict[str, Any], changed: str | None
) -> None:
    choice = chosen(learned(), configured)
    assert choice.timeouts == {name: timeout for name, timeout in LEARNED.items() if name != changed}
    assert [each.name for each in choice.superseded] == ([] if changed is None else [changed])


@pytest.mark.parametrize(
    ("name", "now", "words"),
    [
        ("step", 200.0, "200 s: it was changed (from 180 s) since 12 s was learned"),
        ("step", None, "infinity: it was changed (from 180 s) since 12 s was learned"),
        ("checkpointing", 99.0, "99 s: it was changed (from infinity) since 10 s was learned"),
    ],
)
def test_configured_timeout_that_wins_is_told_with_what_it_was(name: str, now: float | None, words: str) -> None:
    (superseded,) = chosen(learned(), with_section(name, now)).superseded
    assert superseded.describe() == f"'{name}' keeps its configured timeout of {words}"


def test_heartbeats_are_kept_as_a_pair() -> None:
    state = learned(heartbeats=(50.0, 5.0), configured={"rank_heartbeat_timeout": 100.0})
    assert chosen(state, {"rank_heartbeat_timeout": 100.0}).heartbeats == (50.0, 5.0)
    assert chosen(state, {}).heartbeats == (50.0, 5.0)
    assert chosen(state, {"rank_heartbeat_timeout": 90.0}).heartbeats is None


def test_learned_timeout_wins_if_no_configuration_is_remembered() -> None:
    assert set(chosen(learned(configured=None), with_section("step", 1.0)).timeouts) == {*KNOWN, "out_of_section"}


def test_unknown_sections_are_left_out_and_named() -> None:
    state = learned(sections={"step": from_timeout(9.0), "gone": from_timeout(9.0)})
    choice = chosen(state, {})
    assert choice.timeouts == {"step": 9.0, "out_of_section": 20.0}
    assert choice.unknown == ("gone",)
    assert choose(state, configured={}).timeouts.keys() == {"step", "gone", "out_of_section"}


def test_loaded_timeout_below_the_floor_is_raised_to_it() -> None:
    choice = chosen(learned(sections={"step": from_timeout(0.1)}), CONFIGURED)
    assert choice.learned["step"] == LearnedTimeout(
        timeout_s=LEARNED_FLOOR_S, first_s=LEARNED_FLOOR_S, limit_s=LEARNED_FLOOR_S
    )


def test_client_understands_the_state_of_chosen_timeouts() -> None:
    choice = chosen(learned(heartbeats=(50.0, 5.0)), CONFIGURED)
    state = client_state_of(choice.timeouts, choice.heartbeats, None)
    calculated = state_from_dict(json.loads(json.dumps(state)))
    assert calculated.heartbeats == (50.0, 5.0)
    assert calculated.sections == {"checkpointing": 10.0, "setup": 11.0, "step": 12.0}
    assert calculated.out_of_section == 20.0


# --- what is kept ---


def client_state(**sections: float) -> dict[str, Any]:
    return state_to_dict(None, SectionTimeouts(sections, 7.0, set(sections), True))


def kept(state: dict[str, Any], configured: Mapping[str, Any] = CONFIGURED) -> LearnedState:
    return from_client(state, configured=configured, written_at_unix_s=1.7e9, world_size=4)


def test_timeouts_that_a_client_calculated_are_kept() -> None:
    state = kept(client_state(step=9.0))
    assert (state.sections, state.out_of_section) == ({"step": from_timeout(9.0)}, from_timeout(7.0))
    assert (state.configured, state.world_size) == (CONFIGURED, 4)


def test_job_of_another_size_is_told() -> None:
    assert describe_difference(learned(world_size=8), world_size=8) is None
    assert describe_difference(learned(), world_size=8) is None
    assert describe_difference(learned(world_size=8), world_size=1) == (
        "they were learned with 8 ranks, and this run has 1 rank: the longest intervals may be others now"
    )


# --- for the launcher ---


def survey(**timeouts: float) -> Learned:
    return Learned(
        0,
        1,
        Moment.SAVE,
        timeouts={name: from_timeout(timeout_s) for name, timeout_s in timeouts.items()},
        known={name: Known(reference_s=timeout_s) for name, timeout_s in timeouts.items()},
    )


def after(state: LearnedState, learned_now: Learned, configured: dict[str, Any]) -> LearnedState:
    return state_after(state, learned_now, configured=configured, world_size=4, written_at_unix_s=1.7e9)


def test_survey_replaces_its_timeouts_and_keeps_the_others() -> None:
    state = after(learned(heartbeats=(50.0, 5.0)), survey(step=33.0, out_of_section=44.0), CONFIGURED)
    assert {name: entry.timeout_s for name, entry in state.timeouts.items()} == {
        "checkpointing": 10.0,
        "setup": 11.0,
        "step": 33.0,
        "out_of_section": 44.0,
    }
    assert state.known["step"].reference_s == 33.0
    assert (state.heartbeats, state.configured, state.world_size) == ((50.0, 5.0), CONFIGURED, 4)
    assert parse(json.loads(json.dumps(to_document(state)))) == state


def test_armed_timeouts_that_are_only_reported_leave_out_configured_sections() -> None:
    choice = chosen(learned(), {})
    assert armed(choice.learned, configured=CONFIGURED, enforced=True).keys() == choice.learned.keys()
    assert armed(choice.learned, configured=CONFIGURED, enforced=False) == {
        "checkpointing": Armed(10.0, 10.0, 40.0, False)
    }
    no_step = {"rank_section_timeouts": {"step": None}, "rank_out_of_section_timeout": None}
    assert armed(choice.learned, configured=no_step, enforced=False).keys() == choice.learned.keys()


def killed(state: LearnedState, name: str = "step", configured: dict[str, Any] | None = None) -> LearnedState:
    return state_after_kill(state, name, factor=5.0, rule=BUDGET, configured=configured or {})


def quick_state() -> LearnedState:
    seen = Sketch(ended=1000, longest_s=0.02, first_s=0.02, tail=((bucket_of(0.02), 996.0),))
    return LearnedState(
        sections={"step": LearnedTimeout(timeout_s=5.0, first_s=5.0, limit_s=20.0, max_observed_s=0.02, rank_of_max=3)},
        known={"step": after_update(Known(), seen, factor=5.0)},
    )


def test_doubling_after_a_kill_holds_at_the_floor_and_survives_the_file() -> None:
    state = killed(quick_state())
    assert state.sections["step"] == LearnedTimeout(
        timeout_s=10.0, first_s=10.0, limit_s=40.0, previous_s=5.0, max_observed_s=0.02, rank_of_max=3, raised=2.0
    )
    read = parse(json.loads(json.dumps(to_document(state))))
    assert chosen(read, {}).timeouts == {"step": 10.0}
    again = killed(read)
    assert again.sections["step"].timeout_s == 20.0
    assert again.known["step"].now.raised == 4.0


def test_kill_by_a_timeout_of_unknown_origin_doubles_it() -> None:
    state = LearnedState(sections={"step": from_timeout(60.0)}, out_of_section=from_timeout(70.0))
    assert killed(state).sections["step"].timeout_s == 120.0
    assert killed(killed(state)).sections["step"].timeout_s == 240.0
    out = killed(state, "out_of_section").out_of_section
    assert out is not None
    assert out.timeout_s == 140.0
    assert killed(state, configured={"rank_section_timeouts": {"step": 90.0}}).sections["step"].timeout_s == 90.0


def test_kill_by_a_timeout_that_is_not_in_the_file_is_remembered_only() -> None:
    state = killed(LearnedState(), "other")
    assert not state.timeouts
    assert state.known["other"].now.raised == 2.0


# --- the document ---


def test_the_document_is_readable() -> None:
    state = learned(
        sections={"step": msgspec.structs.replace(from_timeout(9.0), max_observed_s=1.8, rank_of_max=3)},
        written_at_unix_s=1_700_000_000.25,
        world_size=8,
    )
    document = to_document(state)
    assert document["schema"] == "megatron_ft.ft_state"
    assert document["schema_version"] == 3
    assert document["written_at_utc"] == "2023-11-14T22:13:20+00:00"
    assert document["world_size"] == 8
    assert document["sections"] == {
        "step": {
            "timeout_s": 9.0,
            "first_s": 9.0,
            "limit_s": 36.0,
            "previous_s": None,
            "max_observed_s": 1.8,
            "rank_of_max": 3,
            "raised": 1.0,
        }
    }
    assert document["configured_s"] == CONFIGURED
    assert parse({**document, "configured_s": {**CONFIGURED, "": float("inf")}}) == parse(document)


seconds = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
entries = st.builds(
    LearnedTimeout,
    timeout_s=seconds,
    first_s=seconds,
    limit_s=seconds,
    raised=st.floats(1.0, 1e6),
    previous_s=st.none() | seconds,
    max_observed_s=st.none() | seconds,
    rank_of_max=st.none() | st.integers(0, 1 << 20),
)
tails = st.dictionaries(st.integers(0, 255), st.integers(1, 10**6).map(float), max_size=6).map(
    lambda counts: tuple(sorted(counts.items()))
)
pasts = st.builds(PastIntervals, tail=tails, explained_s=seconds, raised=st.floats(1.0, 1e6))
knowns = st.builds(
    Known,
    start=pasts,
    now=pasts,
    ended=st.integers(0, 1 << 40),
    first_s=seconds,
    earlier_first_s=st.lists(seconds, max_size=8).map(tuple),
    reference_s=st.none() | seconds,
    usual_s=st.none() | seconds,
    updates=st.integers(0, 400),
)
states = st.builds(
    LearnedState,
    known=st.dictionaries(st.text(min_size=1, max_size=20), knowns, max_size=2),
    sections=st.dictionaries(st.text(min_size=1, max_size=20), entries, max_size=5),
    out_of_section=st.none() | entries,
    heartbeats=st.none() | st.tuples(seconds, seconds),
    configured=st.none()
    | st.fixed_dictionaries(
        {"rank_section_timeouts": st.dictionaries(st.text(min_size=1, max_size=20), st.none() | seconds)},
        optional={"rank_out_of_section_timeout": st.none() | seconds, "rank_heartbeat_timeout": seconds},
    ),
    written_at_unix_s=st.none() | st.floats(0, 4e9),
    world_size=st.none() | st.integers(1, 1 << 20),
)


@given(states)
def test_the_round_trip_is_exact(state: LearnedState) -> None:
    assert parse(json.loads(json.dumps(to_document(state), allow_nan=False))) == state


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def parsed(document: Any) -> LearnedState | None:
    """None if it is refused, in one line."""
    line: str | None = None
    try:
        return parse(document)
    except ConfigError as error:
        line = str(error)
    assert "\n" not in line
    return None


@given(states, st.data())
def test_document_with_any_value_in_any_place_is_read_or_refused(state: LearnedState, data: st.DataObject) -> None:
    document: Any = json.loads(json.dumps(to_document(state)))
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place, key = place[key], data.draw(st.sampled_from(sorted(place[key])))
    place[key] = data.draw(values)
    result = parsed(document)
    if result is not None:
        choice = choose(result, configured={}, known_sections=frozenset(result.sections))
        assert all(0.0 < timeout <= 1e9 for timeout in choice.timeouts.values())
        fresh = replace(result, written_at_unix_s=1.7e9)
        assert parse(json.loads(json.dumps(to_document(fresh), allow_nan=False))) == fresh


@given(values)
def test_document_of_any_content_is_read_or_refused(document: Any) -> None:
    for candidate in (document, {"current_timeouts": document}, {"current_timeouts": {"section": document}}):
        parsed(candidate)


def test_a_plain_state_dict_is_read() -> None:
    plain = state_to_dict(HeartbeatTimeouts(50.0, 5.0, True), SectionTimeouts({"step": 9.0}, None, {"step"}, False))
    state = parse(plain)
    assert state.sections == {"step": from_timeout(9.0)}
    assert state.heartbeats == (50.0, 5.0)
    assert state.configured is None


def test_a_plain_state_dict_of_nothing_is_read() -> None:
    assert parse(state_to_dict(None, None)) == LearnedState()


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ([], "holds list"),
        (None, "holds nothing"),
        ({}, "holds no learned timeouts"),
        ({"schema": "x"}, "schema is 'x'"),
        ({"schema": "megatron_ft.ft_state"}, "schema_version"),
        ({"schema": "megatron_ft.ft_state", "schema_version": 4, "sections": {}}, "newer than 3"),
        ({"schema": "megatron_ft.ft_state", "schema_version": 1}, "sections must be a mapping, not nothing"),
        (
            {"schema": "megatron_ft.ft_state", "schema_version": 1, "sections": {"step": {}}},
            "timeout_s of 'step' must be a number of seconds above 0",
        ),
        (
            {"schema": "megatron_ft.ft_state", "schema_version": 1, "sections": {"step": {"timeout_s": -2}}},
            "timeout_s of 'step' must be a finite number and not negative, not -2",
        ),
        (
            {"schema": "megatron_ft.ft_state", "schema_version": 3, "sections": {"step": {"timeout_s": 1}}},
            "'step': learned_timeout: Object missing required field `first_s`",
        ),
        (
            {"schema": "megatron_ft.ft_state", "schema_version": 3, "sections": {}, "seen": {"step": {"now": 3}}},
            "seen of 'step': known: Expected `object`, got `int` - at `$.now`",
        ),
    ],
)
def test_broken_document_is_refused_with_a_reason(document: Any, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(document)
    assert what in str(error.value)


def test_newer_schema_is_told_from_a_broken_document() -> None:
    newer = {"schema": "megatron_ft.ft_state", "schema_version": 4}
    with pytest.raises(NewerStateError):
        parse(newer)
    with pytest.raises(ConfigError) as broken:
        parse({**newer, "schema_version": 3})
    assert not isinstance(broken.value, NewerStateError)


def test_document_of_version_2_is_read_with_what_was_known() -> None:
    entry = {"timeout_s": 9.0, "previous_s": 1.0, "max_observed_s": 1.8, "rank_of_max": 3, "first_timeout_s": 60.0}
    document = {
        "schema": "megatron_ft.ft_state",
        "schema_version": 2,
        "sections": {"step": {**entry, "suspect_after_s": 6.0}},
        "out_of_section": {"timeout_s": 20.0},
        "seen": {"step": {"counts": {"80": 99.0}, "first_s": 12.0, "reference_s": 50.0, "updates": 3, "raised": 4.0}},
    }
    state = parse(document)
    assert state.sections["step"] == LearnedTimeout(
        timeout_s=9.0, first_s=60.0, limit_s=36.0, previous_s=1.0, max_observed_s=1.8, rank_of_max=3
    )
    past = PastIntervals(tail=((80, 99.0),), raised=4.0)
    assert state.known == {"step": Known(start=past, now=past, earlier_first_s=(12.0,), reference_s=50.0)}
    assert parse({**document, "schema_version": 1, "seen": None}).sections == state.sections


def test_file_has_all_timeouts_in_the_form_of_the_reference() -> None:
    state = learned(heartbeats=(50.0, 5.0), sections={"step": from_timeout(9.0)}, out_of_section=None)
    document = json.loads(json.dumps(file_document(state, CONFIGURED)))
    assert parse(document) == state
    assert document["current_timeouts"] == {
        "heartbeat": {"initial": 50.0, "subsequent": 5.0, "were_calculated": True},
        "section": {
            "section": {"setup": 600.0, "step": 9.0},
            "out_of_section": 300.0,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }
    assert state_from_dict(document) == ((50.0, 5.0), {"step": 9.0}, None)
