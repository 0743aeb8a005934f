"""The user's directory for the last snapshot: what is found there, when it is replaced, and when it is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_ft.memory.base.keeper_messages import FilesWritten, WriteFiles
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, SavedFiles, SnapshotKey

KEY = SnapshotKey(0, 0, 9)
NAME = set_name(7, 4, "an earlier life")


class Directory:
    """A directory, and the lines that are printed about it."""

    def __init__(self, path: Path | None) -> None:
        self.said: list[str] = []
        self.announced: list[str] = []
        given = None if path is None else str(path)
        self.files = SnapshotFiles(given, timeout_s=25.0, ranks=2, say=self.said.append, announce=self.announced.append)

    def order(
        self, key: SnapshotKey = KEY, asked_s: float | None = None, persistent: int | None = None
    ) -> WriteFiles | None:
        return self.files.order(key, 4, "a life", asked_s=asked_s, persistent=persistent)


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
        f"the memory checkpoint of iteration 9 in {tmp_path} isn't whole (2 of 4 ranks missing): it isn't used"
    ]


@pytest.mark.parametrize(
    ("key", "is_gone"),
    [(SnapshotKey(EARLIER_LIFE, 0, 9), False), (SnapshotKey(0, 0, 7), False), (SnapshotKey(0, 0, 8), True)],
)
def test_files_go_once_a_newer_snapshot_is_complete(tmp_path: Path, key: SnapshotKey, is_gone: bool) -> None:
    left(tmp_path, 4)
    left(tmp_path, 2, set_name(5, 4, "another life"))
    directory = Directory(tmp_path)
    directory.files.look()
    directory.files.superseded(key)
    assert directory.files._thread.wait(20.0)
    assert (os.listdir(tmp_path) == []) == is_gone


def test_files_of_an_earlier_version_are_not_used_with_a_line_and_stay_until_a_newer_snapshot_is_complete(
    tmp_path: Path,
) -> None:
    (tmp_path / NAME / "ranks-0-3").mkdir(parents=True)
    for rank in range(4):
        (tmp_path / NAME / "ranks-0-3" / f"rank-{rank}").touch()
    left(tmp_path, 2, set_name(8, 4, "another life"))
    directory = Directory(tmp_path)
    directory.files.look()
    assert directory.files.found.files is None
    where = f"the memory checkpoint of iteration 7 in {tmp_path}"
    assert f"{where} was written by an earlier version of megatron_ft: it isn't used" in directory.said
    for iteration, names in ((3, [NAME]), (7, [NAME]), (8, [])):
        directory.files.superseded(SnapshotKey(0, 0, iteration))
        assert directory.files._thread.wait(20.0)
        assert os.listdir(tmp_path) == names


def test_last_complete_snapshot_is_written_in_the_time_that_is_left(tmp_path: Path) -> None:
    directory, name = Directory(tmp_path), set_name(9, 4, "a life")
    hurried, order = directory.order(asked_s=time.monotonic() - 20.0), directory.order()
    assert order == WriteFiles(str(tmp_path), name, KEY, 25.0)
    assert hurried is not None
    assert hurried.within_s == pytest.approx(5.0, abs=1.0)
    directory.files.written(order, FilesWritten(10**9, 0.5))
    assert directory.announced == [f"wrote iteration 9 to {tmp_path}/{name} (1 GB of this node, 0.5 s)"]


@pytest.mark.parametrize(
    ("key", "persistent", "is_written"),
    [(KEY, 8, True), (KEY, 9, False), (SnapshotKey(EARLIER_LIFE, 0, 9), None, False)],
)
def test_what_is_on_disk_already_is_not_written(
    tmp_path: Path, key: SnapshotKey, persistent: int | None, is_written: bool
) -> None:
    assert (Directory(tmp_path).order(key, persistent=persistent) is not None) == is_written
