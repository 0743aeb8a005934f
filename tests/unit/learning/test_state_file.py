"""What was learned, and its file: in all versions, whole at any moment; what is found in its place stops no run."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import (
    HeartbeatTimeouts,
    LearnedState,
    SectionTimeouts,
    StateFile,
    configured_of,
    parse,
    state_from_dict,
    state_to_dict,
    that_applies,
)

SECTIONS: dict[str, float | None] = {"setup": 600.0, "step": 180.0}
CONFIGURED = {**SECTIONS, "out_of_section": 300.0}
LEARNED = {"checkpointing": 10.0, "setup": 11.0, "step": 12.0, "out_of_section": 20.0}
HEARTBEAT = "rank_heartbeat_timeout"
BEATS = HeartbeatTimeouts(50.0, 5.0, True)


def learned(timeouts: dict[str, float] = LEARNED, **changes: Any) -> LearnedState:
    return LearnedState(**{"timeouts": timeouts, "configured_s": CONFIGURED, **changes})


def test_learning_replaces_nothing_that_was_not_seen_and_averages_what_was() -> None:
    state = learned({"step": 50.0, "setup": 300.0}).doubled("step", 50.0, {})
    after = state.learn({"step": Observed(50, 40.0, 7)}, 5.0)
    assert after.timeouts == {"step": 150.0, "setup": 300.0}


@pytest.mark.parametrize(
    ("changed", "now_s", "line"),
    [
        ("checkpointing", 99.0, "99 s: it was changed (from infinity) since 10 s was learned"),
        ("step", 200.0, "200 s: it was changed (from 180 s) since 12 s was learned"),
        (HEARTBEAT, 90.0, "90 s: it was changed (from 100 s) since 5 s was learned"),
    ],
)
def test_learned_timeout_applies_unless_its_configured_value_was_changed_since(
    changed: str, now_s: float | None, line: str
) -> None:
    then, now = {**CONFIGURED, HEARTBEAT: 100.0}, {**CONFIGURED, changed: now_s}
    state, lines = that_applies(learned(heartbeats=BEATS, configured_s=then), now)
    assert state.timeouts == {name: timeout for name, timeout in LEARNED.items() if name != changed}
    assert state.heartbeats == (None if changed == HEARTBEAT else BEATS), "a pair"
    assert lines == [f"'{changed}' keeps its configured timeout of {line}"]
    assert that_applies(learned(configured_s=None), now)[0].timeouts == LEARNED
    for same in ({"setup": 600.0}, {**CONFIGURED, "checkpointing": None}):
        mine = learned(heartbeats=BEATS)
        assert that_applies(mine, same) == (mine, []), "as they were, or no longer set"


seconds = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
names = st.text(min_size=1, max_size=20)
states = st.builds(
    LearnedState,
    timeouts=st.dictionaries(names, seconds, max_size=5),
    heartbeats=st.none() | st.builds(HeartbeatTimeouts, seconds, seconds, st.just(True)),
    configured_s=st.dictionaries(names, st.none() | seconds, max_size=5),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def document_of(state: LearnedState) -> Any:
    return json.loads(json.dumps(state.document(state.configured_s or {}, 60.0), allow_nan=False))


@given(states, st.data())
def test_document_is_read_as_it_was_written_and_with_any_value_in_any_place_or_refused(
    state: LearnedState, data: st.DataObject
) -> None:
    document = document_of(state)
    assert parse(document) == state
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place, key = place[key], data.draw(st.sampled_from(sorted(place[key])))
    place[key] = data.draw(values)
    timeouts, why = dict[str, float](), ""
    try:
        timeouts = parse(document).timeouts
    except ConfigError as error:
        why = str(error)
    assert "\n" not in why
    assert all(0.0 < timeout_s <= 1e9 for timeout_s in timeouts.values())


def test_state_of_the_reference_holds_all_timeouts_and_is_read_with_the_calculated_ones_only() -> None:
    sections = SectionTimeouts({"a": 3.0, "b": 9.0, "c": None}, 7.0, {"a"}, True)
    state = json.loads(json.dumps(state_to_dict(BEATS, sections)))
    assert SectionTimeouts(**state["current_timeouts"]["section"]) == sections
    assert parse(state) == LearnedState(timeouts={"a": 3.0, "out_of_section": 7.0}, heartbeats=BEATS)
    configured = HeartbeatTimeouts(1.0, 2.0, False)
    assert parse(state_to_dict(configured, SectionTimeouts({"a": 3.0}))) == parse(state_to_dict(None, None))
    assert parse({"current_timeouts": {"heartbeat": asdict(configured)}}) == LearnedState()
    assert state_from_dict({}) == (None, SectionTimeouts())


def test_timeouts_are_valid_once_they_are_complete() -> None:
    assert not HeartbeatTimeouts().are_valid
    assert HeartbeatTimeouts(1, 2).are_valid
    assert not SectionTimeouts({"a": 1.0}).are_valid
    assert not SectionTimeouts({"a": None}, 1.0).are_valid
    assert SectionTimeouts({"a": 1.0}, 1.0).are_valid
    assert not SectionTimeouts({"a": 1.0}, 1.0, {"a"}).were_calculated
    assert SectionTimeouts({"a": 1.0}, 1.0, ["a"], True).were_calculated  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "step_s"), [(1, 9.0), (2, 50.0), (3, 100.0), (4, 24.0)])
def test_document_of_an_earlier_version_is_read_with_what_its_rule_had_calculated(version: int, step_s: float) -> None:
    calculated = {"calculated_s": 12.0} if version == 4 else {"timeout_s": 9.0, "previous_s": None}
    entry = {**calculated, "max_observed_s": 1.8, "rank_of_max": 3} | ({"raised": 2.0} if version == 3 else {})
    document = {
        "schema": "megatron_ft.ft_state",
        "schema_version": version,
        "written_at_utc": "2026-11-28T03:26:21+00:00",
        "world_size": 8,
        "sections": {"step": entry, "setup": {**entry, "max_observed_s": 1000.0}},
        "out_of_section": {**calculated, "max_observed_s": 4.0},
        "seen": {"step": {"counts": {"80": 99.0}, "reference_s": 50.0}} if version in (2, 3) else None,
        "heartbeats": {"initial_s": 50.0, "subsequent_s": 5.0},
        "current_timeouts": {"heartbeat": {"initial": 50.0, "subsequent": 5.0, "were_calculated": True}},
        "configured_s": {"rank_section_timeouts": {"step": None}, HEARTBEAT: 45.0},
        **({"raised": {"step": 2.0}} if version == 4 else {}),
    }
    state = parse(document)
    out_s = 12.0 if version == 4 else 9.0
    assert state.timeouts == {"step": step_s, "setup": 1250.0, "out_of_section": out_s}
    assert (state.heartbeats, state.configured_s) == (BEATS, {"step": None, HEARTBEAT: 45.0})


def test_file_has_all_timeouts_in_the_form_of_the_reference() -> None:
    configured = configured_of({"rank_section_timeouts": SECTIONS, "rank_out_of_section_timeout": 300.0, "learn": "on"})
    assert configured == CONFIGURED
    state = learned({"step": 90.0}, heartbeats=BEATS)
    document = document_of(state.doubled("heartbeat", 50.0, {}))
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
    assert (heartbeats, sections.calculated) == (BEATS, {"step": 90.0})


STATE = LearnedState(timeouts={"step": 12.0}, configured_s={})
DOCUMENT = STATE.document({}, 60.0)
LEFT = "leaving it alone, timeouts learned in this run are not written"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file that was written."""
    path = str(tmp_path / "new" / "ft_state.json")
    assert carry_out(StateFile(path)) == StateFile(path), "there is none yet"
    wanted = StateFile(path, DOCUMENT, at_end=True)
    old = os.umask(0o027)
    try:
        assert carry_out(wanted) == wanted
    finally:
        os.umask(old)
    return path


NO_VALUE = "one that was calculated has no value"
EARLIER = "as an earlier version writes them"


def ours(version: int | None, **rest: object) -> dict[str, object]:
    return {"schema": "megatron_ft.ft_state", "schema_version": version, **rest}


def reference(**timeouts: object) -> dict[str, object]:
    return {"current_timeouts": timeouts}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not JSON"),
        (b'{"a": NaN}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (1 << 20) + b"{}", "has more than"),
        (None, "holds no learned timeouts"),
        ({"schema": "x"}, "schema is 'x'"),
        (ours(None), "version None"),
        (ours(6, timeouts=7), "newer than 5"),
        (ours(5, **reference(heartbeat={"initial": -1})), "> 0"),
        (ours(4, sections={"step": {"calculated_s": 10**400}}), EARLIER),
        (reference(heartbeat={"initial": -1, "subsequent": 2, "were_calculated": True}), "> 0"),
        (reference(heartbeat={"initial": 1, "were_calculated": True}), NO_VALUE),
        (reference(section={"section": {"a": True}, "calculated_sections": ["a"]}), "Expected `float"),
        (reference(section={"is_out_of_section_calculated": True}), NO_VALUE),
    ],
)
def test_broken_file_is_refused_with_a_reason_and_left_alone(content: Any, why: str, path: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    Path(path).write_bytes(data)
    found = carry_out(StateFile(path))
    assert found.state is None
    assert re.search(rf"^{re.escape(path)} [^\n]*({why})[^\n]*: {LEFT}$", found.problem)
    assert Path(path).read_bytes() == data


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(os.mkdir, "is not a regular file", id="directory"),
        pytest.param(os.mkfifo, "is not a regular file", id="fifo_without_a_writer"),
        pytest.param(lambda path: os.symlink(path, path), "can't be read: Too many levels", id="loop_of_links"),
    ],
)
def test_anything_else_in_place_of_the_state_file_is_left_alone(
    path: str, make: Callable[[str], None], words: str
) -> None:
    os.remove(path)
    make(path)
    found = carry_out(StateFile(path))
    assert found.state is None
    assert re.search(rf"^{re.escape(path)} {words}[^\n]*: {LEFT}$", found.problem)
    assert os.path.lexists(path)


def test_file_is_replaced_once_its_content_is_on_the_disk_or_left_as_it_was(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    full = OSError(28, "No space left on device")

    def traced(name: str, *, fails: bool) -> None:
        real = getattr(os, name)

        def act(*args: Any, **folders: Any) -> None:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            done.append("folder" if is_folder else name)
            if fails:
                raise full
            real(*args, **folders)

        monkeypatch.setattr(os, name, act)

    for failing in ("fsync", "replace"):
        traced(failing, fails=True)
        assert carry_out(StateFile(path, {"new": 1})).problem == (
            f"learned timeouts can't be written to {path}: No space left on device"
        )
        monkeypatch.undo()
    with pytest.raises(ValueError, match="not JSON compliant"):
        carry_out(StateFile(path, {"new": float("nan")}))
    assert carry_out(StateFile(path)).state == STATE
    assert os.listdir(os.path.dirname(path)) == ["ft_state.json"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640, "read by those whom the umask allows"
    done.clear()
    for name in ("fsync", "replace"):
        traced(name, fails=False)
    carry_out(StateFile(path, {}))
    assert done == ["fsync", "replace", "folder"]
