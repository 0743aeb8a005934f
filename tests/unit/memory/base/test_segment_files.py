"""Segments in files: whole or not at all, only this user's regular files, and every rank's own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.errors import LayoutError, SnapshotError
from megatron_ft.memory.base import segment, segment_files
from megatron_ft.memory.base.segment_files import find_sets, load, remove_set, set_name
from megatron_ft.memory.keeper import work
from tests.support.extras import skip_module_without

skip_module_without("xxhash")

from tests.memory.flips import DIGEST, KEY, filled  # noqa: E402 - needs xxhash

NAME = set_name(KEY.iteration, 1, "a life")


@pytest.fixture
def fd() -> Iterator[int]:
    made = filled({"a": b"x" * 100, "b": b"y" * 70})
    segment.seal(made, os.fstat(made).st_size)
    yield made
    os.close(made)


def write(directory: Path, fd: int, name: str = NAME) -> int:
    return segment_files.write(str(directory), name, {0: fd})


def everything(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_segment_comes_back_byte_by_byte_from_a_private_file(tmp_path: Path, fd: int) -> None:
    assert write(tmp_path / "new", fd) == os.fstat(fd).st_size
    modes = {(each.is_file(), stat.S_IMODE(each.stat().st_mode)) for each in everything(tmp_path)}
    assert modes == {(True, 0o600), (False, 0o700)}
    back = load(str(tmp_path / "new"), NAME, 0)
    assert segment.read_layout(back, DIGEST) == segment.read_layout(fd, DIGEST)
    assert os.pread(back, 1 << 20, 0) == os.pread(fd, 1 << 20, 0)
    os.close(back)


def is_refused(directory: Path) -> bool:
    try:
        fd = load(str(directory), NAME, 0)
    except LayoutError:
        return True
    try:
        return isinstance(work.check(fd, DIGEST), str)
    finally:
        os.close(fd)


def test_flipped_bit_in_any_byte_of_a_file_is_found(tmp_path: Path, fd: int) -> None:
    write(tmp_path, fd)
    assert not is_refused(tmp_path)
    path = tmp_path / NAME / "rank-0"
    data = path.read_bytes()
    for at, byte in enumerate(data):
        path.write_bytes(data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :])
        assert is_refused(tmp_path), at


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_disk_that_fails_leaves_nothing(tmp_path: Path, fd: int, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path, fd)
    assert everything(tmp_path) == []
    assert find_sets(str(tmp_path)) == []


def test_removal_follows_no_link(tmp_path: Path, fd: int) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    write(tmp_path / "new", fd)
    (tmp_path / "new" / NAME / "link").symlink_to(other)
    remove_set(str(tmp_path / "new"), NAME)
    assert everything(tmp_path / "new") == []
    assert (other / "precious").exists()


@pytest.mark.parametrize("place", ["link to a file", "link to a set", "pipe"])
def test_link_or_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path, fd: int, place: str) -> None:
    write(tmp_path, fd)
    path = tmp_path / NAME if place == "link to a set" else tmp_path / NAME / "rank-0"
    moved = tmp_path / "moved"
    path.rename(moved)
    if place == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(moved)
    with pytest.raises(OSError):  # noqa: PT011 - another errno for each kind
        load(str(tmp_path), NAME, 0)
    assert len(find_sets(str(tmp_path))) == (0 if place == "link to a set" else 1)


@pytest.mark.parametrize(("is_wanted", "refused"), [(False, "no longer needed"), (True, "0 GB are free")])
def test_file_that_is_not_wanted_or_has_no_memory_leaves_no_segment(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch, is_wanted: bool, refused: str
) -> None:
    write(tmp_path, fd)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(work, "refuse_chunk", lambda _count, _memory: refused if is_wanted else "")
    with pytest.raises(SnapshotError, match=refused):
        load(str(tmp_path), NAME, 0, work.room_maker(lambda: is_wanted))
    assert len(os.listdir("/proc/self/fd")) == before


def test_set_whose_removal_is_cut_off_is_not_whole(tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, removed = os.unlink, list[str]()

    def fail(path: str, **named: int) -> None:
        if removed:
            raise OSError(errno.EIO, "killed")
        removed.append(path)
        unlink(path, **named)

    name = set_name(KEY.iteration, 2, "a life")
    segment_files.write(str(tmp_path), name, {0: fd, 1: fd})
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="killed"):
            remove_set(str(tmp_path), name)
    assert [lacking for _, lacking in find_sets(str(tmp_path))] == [1]
    for _ in range(2):  # another launcher does so, too
        remove_set(str(tmp_path), name)
    assert everything(tmp_path) == []
