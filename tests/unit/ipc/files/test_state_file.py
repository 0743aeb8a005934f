"""The state file: whole at any moment, and nothing that is found in its place can stop a run."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.ipc.files.state_file import (
    BrokenStateFile,
    UnreadableStateFile,
    read_state,
    set_aside,
    write_state,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ft_state.json")


def test_state_is_read_as_it_was_written(path: str) -> None:
    document = {"a": 1.5, "b": None, "c": {"d": ["ü"]}}
    write_state(path, document)
    assert read_state(path) == document
    assert os.listdir(os.path.dirname(path)) == ["ft_state.json"]


def test_the_umask_decides_who_may_read(path: str) -> None:
    old = os.umask(0o027)
    try:
        write_state(path, {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b'{"a": 1', "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b"null", "holds null"),
        (b"\xff\xfe\x00", "is not a text file"),
        (b"\x00" * 100, "is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b" " * (1 << 20) + b"{}", "has more than"),
        (b"1" * 5000, "is not JSON"),
    ],
)
def test_broken_content_is_refused_with_a_reason(content: bytes, why: str, path: str) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(BrokenStateFile, match=why) as error:
        read_state(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(os.mkdir, "is a directory", id="directory"),
        pytest.param(os.mkfifo, "is not a regular file", id="fifo_without_a_writer"),
        pytest.param(lambda path: os.symlink(path, path), "can't be read", id="loop_of_links"),
    ],
)
def test_anything_else_in_place_of_the_state_file_is_an_error_at_once(
    path: str, make: Callable[[str], None], words: str
) -> None:
    make(path)
    with pytest.raises(UnreadableStateFile, match=words):
        read_state(path)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_an_error_of_the_file_system_is_no_broken_file(number: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(path, {})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(UnreadableStateFile, match=f"^can't be read: {os.strerror(number)}$"):
        read_state(path)


def test_files_set_aside_dont_replace_each_other(path: str) -> None:
    for number in (1, 2, 3):
        Path(path).write_text(f"broken {number}")
        assert set_aside(path) == f"{path}.corrupt-{number}"
    assert [Path(f"{path}.corrupt-{n}").read_text() for n in (1, 2, 3)] == ["broken 1", "broken 2", "broken 3"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(path, {"old": 1})

    def fail(*args: Any, **folders: Any) -> None:
        raise OSError(28, "No space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(OSError, match="No space"):
                write_state(path, {"new": 1})
        assert read_state(path) == {"old": 1}
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
    write_state(path, {})
    assert steps == ["file", "rename", "folder"]


def test_values_that_json_has_not_are_refused_before_anything_is_written(path: str) -> None:
    write_state(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_state(path, {"new": float("nan")})
    assert read_state(path) == {"old": 1}


def test_old_temporaries_of_killed_writers_are_removed_and_only_those(path: str) -> None:
    folder = Path(path).parent
    old, young = folder / ".123-00ff00ff.tmp", folder / ".124-00ff00ff.tmp"
    others = [folder / ".metadata", folder / "iter_10.tmp", folder / "common.pt"]
    for file in (old, young, *others):
        file.write_text("")
    past = time.time() - 10_000
    for file in (old, *others):
        os.utime(file, (past, past))
    write_state(path, {})
    assert not old.exists()
    assert young.exists()
    assert all(file.exists() for file in others)
