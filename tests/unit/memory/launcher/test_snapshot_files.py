"""The user's directory for the last snapshot: what is found there, when it is replaced, and when it is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.memory.base.keeper_messages import FilesWritten, WriteFiles
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, SavedFiles, SnapshotKey

KEY = SnapshotKey(0, 0, 9)
NAME = set_name(7, 4, "an earlier life")


class Recorder:
    """A keeper with a complete snapshot, that notes what it is to write."""

    def __init__(self, key: SnapshotKey | None = KEY, why: str = "") -> None:
        self.key = key
        self.why = why
        self.orders: list[WriteFiles] = []

    def last_complete(self) -> tuple[SnapshotKey, int] | None:
        return None if self.key is None else (self.key, 4)

    def write_files(self, order: WriteFiles, *, is_wanted: Callable[[], bool]) -> FilesWritten:
        self.orders.append(order)
        return FilesWritten(10**9, 0.5, self.why)


class Directory:
    """A directory, and the lines that are printed about it."""

    def __init__(self, path: Path | None) -> None:
        self.said: list[str] = []
        self.announced: list[str] = []
        given = None if path is None else str(path)
        self.files = SnapshotFiles(given, timeout_s=25.0, ranks=2, say=self.said.append, announce=self.announced.append)

    def write(self, keeper: Any, asked_s: float | None = None, persistent: int | None = None) -> None:
        self.files.write(keeper, life="a life", asked_s=asked_s, persistent=persistent, is_hurried=lambda: False)


def left(path: Path, *parts: str, name: str = NAME) -> None:
    """A snapshot of an earlier life."""
    (path / name).mkdir()
    for part in parts:
        (path / name / part).mkdir()


def test_snapshot_that_is_not_whole_is_said_and_the_one_before_is_used(tmp_path: Path) -> None:
    left(tmp_path, "ranks-0-3")
    newer = set_name(9, 4, "a later life")
    left(tmp_path, "ranks-0-1", ".12-ab.tmp", name=newer)
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
    left(tmp_path, "ranks-0-3")
    left(tmp_path, "ranks-0-1", name=set_name(5, 4, "another life"))
    directory = Directory(tmp_path)
    directory.files.look()
    directory.files.superseded(key)
    assert directory.files._thread.wait(20.0)
    assert (os.listdir(tmp_path) == []) == is_gone


def test_last_complete_snapshot_is_written_in_the_time_that_is_left(tmp_path: Path) -> None:
    directory, keeper = Directory(tmp_path), Recorder()
    directory.write(keeper, asked_s=time.monotonic() - 20.0)
    directory.write(keeper)
    name = set_name(9, 4, "a life")
    assert [(each.directory, each.name, each.key) for each in keeper.orders] == 2 * [(str(tmp_path), name, KEY)]
    assert keeper.orders[0].within_s == pytest.approx(5.0, abs=1.0)
    assert keeper.orders[1].within_s == 25.0
    assert directory.announced[0] == f"wrote iteration 9 to {tmp_path}/{name} (1 GB of this node, 0.5 s)"


@pytest.mark.parametrize(
    ("key", "persistent", "is_written"),
    [(KEY, 8, True), (KEY, 9, False), (None, None, False), (SnapshotKey(EARLIER_LIFE, 0, 9), None, False)],
)
def test_what_is_on_disk_already_is_not_written(
    tmp_path: Path, key: SnapshotKey | None, persistent: int | None, is_written: bool
) -> None:
    directory, keeper = Directory(tmp_path), Recorder(key)
    directory.write(keeper, persistent=persistent)
    assert bool(keeper.orders) == is_written
