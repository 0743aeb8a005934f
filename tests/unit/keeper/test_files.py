"""The keeper's work with files: how it says that something can't be written or loaded."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core.memory.saved_files import set_name
from megatron_ft.core.messages.keeper_messages import FilesWritten, WriteFiles
from megatron_ft.ipc.memory import segment
from megatron_ft.ipc.memory.segment_files import SegmentToWrite
from megatron_ft.keeper import files
from tests.support.extras import skip_module_without

skip_module_without("xxhash")

from tests.memory.flips import HASHER, KEY, filled  # noqa: E402 - needs xxhash

NAME = set_name(KEY.iteration, 1, "a life")


@pytest.fixture
def fd() -> Iterator[int]:
    made = filled({"a": b"x" * 100})
    segment.seal(made, os.fstat(made).st_size)
    yield made
    os.close(made)


def write(directory: Path, fd: int, ranks: tuple[int, ...] = (0,), *, within_s: float = 60.0) -> FilesWritten:
    order = WriteFiles(str(directory), NAME, KEY, within_s)
    segments = [SegmentToWrite(rank, fd) for rank in ranks]
    return files.write(order, segments, 1, HASHER, time.monotonic() + within_s)


def test_ranks_with_a_gap_are_written_in_two_directories(tmp_path: Path, fd: int) -> None:
    written = write(tmp_path, fd, (0, 1, 5))
    assert (written.why, written.nbytes) == ("", 3 * os.fstat(fd).st_size)
    assert sorted(os.listdir(tmp_path / NAME)) == ["ranks-0-1", "ranks-5-5"]


def test_full_disk_is_said(tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert write(tmp_path, fd).why == "No space left on device"


def test_directory_that_is_a_file_is_said(tmp_path: Path, fd: int) -> None:
    (tmp_path / "file").touch()
    assert write(tmp_path / "file", fd).why == "is a file"


def test_file_is_loaded_unless_it_is_missing_or_memory_is_short(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / NAME)
    assert files.load(path, 0, 1, HASHER, lambda: True) == (-1, "No such file or directory")
    write(tmp_path, fd)
    loaded, why = files.load(path, 0, 1, HASHER, lambda: True)
    assert why == ""
    os.close(loaded)
    assert files.load(path, 0, 1, HASHER, lambda: False) == (-1, "no longer needed")
    monkeypatch.setattr(files, "refuse_chunk", lambda _count, _memory: "0 GB are free")
    assert files.load(path, 0, 1, HASHER, lambda: True) == (-1, "0 GB are free")
