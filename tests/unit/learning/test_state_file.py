"""The state file: whole at any moment, and nothing that is found in its place can stop a run."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import LearnedState, StateFile

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


def test_state_is_read_as_it_was_written_by_those_whom_the_umask_allows(path: str) -> None:
    assert carry_out(StateFile(path)).state == STATE
    assert os.listdir(os.path.dirname(path)) == ["ft_state.json"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640


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
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (1 << 20) + b"{}", "has more than"),
        (b"1" * 5000, "holds no learned timeouts|is not JSON"),
        (None, "holds no learned timeouts"),
        ([], "holds no learned timeouts"),
        ({}, "holds no learned timeouts"),
        ({"schema": "x"}, "schema is 'x'"),
        (ours(None), "version None"),
        (ours(6, timeouts=7), "newer than 5"),
        (ours(5, timeouts=[]), r"Expected `object`, got `array` - at `\$.timeouts`"),
        (ours(5, **reference(heartbeat={"initial": -1})), "> 0"),
        (ours(4, sections=[]), EARLIER),
        (ours(4, sections={"step": {}}), EARLIER),
        (ours(1, sections={"step": {"timeout_s": -2}}), "> 0"),
        ({"current_timeouts": 3}, "Expected `object`"),
        (reference(heartbeat={"initial": -1, "subsequent": 2, "were_calculated": True}), "> 0"),
        (reference(heartbeat={"initial": 1, "were_calculated": True}), NO_VALUE),
        (reference(section={"section": {"a": "3"}, "calculated_sections": ["a"]}), "Expected `float"),
        (reference(section={"section": {"a": True}, "calculated_sections": ["a"]}), "Expected `float"),
        (reference(section={"section": {}, "calculated_sections": ["a"]}), NO_VALUE),
        (reference(section={"section": [], "calculated_sections": 4}), "Expected `object`"),
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


def test_write_that_fails_leaves_the_old_file_and_is_one_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_folders: Any) -> None:
        raise OSError(28, "No space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            done = carry_out(StateFile(path, {"new": 1}))
        assert done.problem == f"learned timeouts can't be written to {path}: No space left on device"
    with pytest.raises(ValueError, match="not JSON compliant"):
        carry_out(StateFile(path, {"new": float("nan")}))
    assert carry_out(StateFile(path)).state == STATE
    assert os.listdir(os.path.dirname(path)) == ["ft_state.json"]


def test_content_reaches_the_disk_before_its_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(fd: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def traced_replace(source: str, target: str, **folders: Any) -> None:
        steps.append("rename")
        replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    carry_out(StateFile(path, {}))
    assert steps == ["file", "rename", "folder"]
