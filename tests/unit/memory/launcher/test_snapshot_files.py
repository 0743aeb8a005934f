"""The user's directory for the last snapshot: what is found there, when it is replaced, and when it is written."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.launcher import snapshot_files
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, SavedFiles, SnapshotKey

KEY = SnapshotKey(0, 0, 9)
NAME = set_name(7, 4, "an earlier life")


class Directory:
    """A directory, and the lines that are printed about it."""

    def __init__(self, path: Path | None, timeout_s: float = 25.0) -> None:
        self.said: list[str] = []
        self.path = None if path is None else str(path)
        say = self.said.append
        self.files = SnapshotFiles(self.path, Reactor(), timeout_s=timeout_s, ranks=2, say=say, say_everywhere=say)

    def write(
        self, key: SnapshotKey = KEY, asked_s: float | None = None, segments: dict[int, int] | None = None, **more: Any
    ) -> list[str]:
        """The names of what is written for two ranks of four. ``asked_s``: from now."""
        settings: dict[str, Any] = {"persistent": None, "is_hurried": lambda: False, **more}
        at_s = None if asked_s is None else time.monotonic() + asked_s
        with open(os.devnull) as content:
            given = segments or dict.fromkeys((0, 1), content.fileno())
            self.files.write(key, 4, given, "a life", asked_s=at_s, **settings)
        return sorted(str(each.relative_to(self.path or "")) for each in Path(self.path or "/none").rglob("rank-*"))


def left(path: Path, ranks: int, name: str = NAME) -> None:
    """A snapshot of an earlier life."""
    (path / name).mkdir()
    for rank in range(ranks):
        (path / name / f"rank-{rank}").touch()


def test_snapshot_that_is_not_whole_is_said_and_the_one_before_is_used(tmp_path: Path) -> None:
    left(tmp_path, 4)
    newer = set_name(9, 4, "a later life")
    left(tmp_path, 2, newer)
    (tmp_path / newer / ".12-ab.tmp-2").touch()
    os.utime(tmp_path / NAME, (0, 0))
    directory = Directory(tmp_path)
    directory.files.look()
    assert directory.files.found.files is not None
    assert replace(directory.files.found.files, age_s=0.0) == SavedFiles(NAME, 7, 4)
    assert directory.said == [
        f"the memory checkpoint of iteration 9 in {tmp_path} isn't whole (2 of 4 ranks missing), "
        "or is of an earlier version: it isn't used"
    ]


@pytest.mark.parametrize(
    ("key", "is_gone"),
    [(SnapshotKey(EARLIER_LIFE, 0, 9), False), (SnapshotKey(0, 0, 7), False), (SnapshotKey(0, 0, 8), True)],
)
def test_files_go_once_a_newer_snapshot_is_complete(tmp_path: Path, key: SnapshotKey, is_gone: bool) -> None:
    left(tmp_path, 4)
    left(tmp_path, 2, set_name(5, 4, "another life"))
    abandoned = set_name(12, 4, "a life before a rollback")
    left(tmp_path, 4, abandoned)
    os.utime(tmp_path / abandoned, (0, 0))
    (tmp_path / set_name(5, 4, "another life") / "ranks-0-1").mkdir()  # as an earlier version made
    directory = Directory(tmp_path)
    directory.files.look()
    directory.files.superseded(key)
    assert directory.files._thread.wait(20.0)
    assert (os.listdir(tmp_path) == []) == is_gone


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"asked_s": -26.0}, "there was no more time"),
        ({"asked_s": -1.0, "is_hurried": lambda: True}, "a second signal asked to stop"),
        ({"segments": {0: -1}}, "there is no segment of rank 0"),
    ],
)
def test_snapshot_that_is_not_written_in_time_or_lacks_a_segment_leaves_nothing(
    tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    directory = Directory(tmp_path)
    assert directory.write(**more) == []
    assert directory.said == [f"iteration 9 in memory isn't written to {tmp_path}/{set_name(9, 4, 'a life')}: {why}"]
    assert os.listdir(tmp_path) == []


def test_disk_that_does_not_answer_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(snapshot_files, "_REMOVE_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(60.0))
    directory, began_s = Directory(tmp_path, timeout_s=0.1), time.monotonic()
    directory.write()
    assert time.monotonic() - began_s < 10.0
    assert directory.said[0].endswith(": there was no more time")
    answers.set()


@pytest.mark.parametrize(
    ("key", "persistent", "files"),
    [(KEY, 8, 2), (KEY, 9, 0), (SnapshotKey(EARLIER_LIFE, 0, 9), None, 0)],
)
def test_what_is_on_disk_already_is_not_written(
    tmp_path: Path, key: SnapshotKey, persistent: int | None, files: int
) -> None:
    assert len(Directory(tmp_path).write(key, persistent=persistent)) == files
