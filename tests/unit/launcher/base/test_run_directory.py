"""The directory of a launcher's sockets is made in a safe place, mended if it was deleted, and removed.

A leftover of a launcher that was killed is known by a lock that no process holds.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from megatron_ft.launcher.base import run_directory
from megatron_ft.launcher.base.run_directory import RunDirectory


class Socket:
    """A file in the place of a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_lost(self) -> bool:
        return not self.path.exists()

    def listen_again(self) -> None:
        self.path.touch()


def test_deleted_run_directory_is_recreated_and_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    directory = RunDirectory(said.append)
    sockets = [Socket(Path(directory.path, name)) for name in ("launcher.sock", "monitor-0.sock")]
    for each in sockets:
        directory.add(each.is_lost, each.listen_again)
        each.listen_again()
    directory.mend()
    assert said == []
    for times in (1, 2):
        shutil.rmtree(directory.path)
        directory.mend()
        assert not any(each.is_lost() for each in sockets)
        assert Path(directory.path, "owner").exists()
        directory.mend()
        assert len(said) == times
    shutil.rmtree(directory.path)
    Path(directory.path).touch()  # something else has its name: that can't be mended
    for _ in range(2):
        directory.mend()
    assert len(said) == 3
    assert "can't be recreated" in said[2]
    os.unlink(directory.path)
    directory.mend()
    directory.close()
    directory.close()
    assert not os.path.lexists(directory.path)


def test_sockets_go_where_nobody_can_put_others_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, is_safe in ((0o777, False), (0o1777, True), (0o700, True)):
        # pytest's directories are too long for sockets
        with tempfile.TemporaryDirectory(dir="/tmp") as given:
            os.chmod(given, bits)
            monkeypatch.setattr(tempfile, "tempdir", given)
            run_dir = run_directory.make_run_directory()
            assert (os.path.dirname(run_dir) == given) == is_safe
            assert stat.S_IMODE(os.stat(run_dir).st_mode) == 0o700
            shutil.rmtree(run_dir)


def made(place: Path, name: str, *, mode: int = 0o700) -> Path:
    path = place / f"megatron_ft-{name}"
    path.mkdir()
    path.chmod(mode)
    (path / "launcher.sock").touch()
    return path


def test_run_directory_of_a_killed_launcher_alone_is_removed(tmp_path: Path) -> None:
    held, left = made(tmp_path, "held"), made(tmp_path, "left")
    made(tmp_path, "unclaimed")  # of a launcher that has just begun, or without locks
    (tmp_path / "megatron_ft-file").touch()
    (tmp_path / "megatron_ft-link").symlink_to(held)
    others = made(tmp_path, "readable", mode=0o755)
    os.close(run_directory.claim(str(others)) or -1)
    foreign = made(tmp_path, "elsewhere")
    (foreign / "owner").write_text(json.dumps(["another-host", "another-boot"]))
    broken = made(tmp_path, "broken")
    (broken / "owner").write_text("{")
    (tmp_path / "mine").mkdir()
    claims = [run_directory.claim(str(path)) for path in (held, left)]
    before = set(os.listdir(tmp_path))
    run_directory.remove_leftovers(str(tmp_path))
    assert set(os.listdir(tmp_path)) == before
    os.close(claims[1] or -1)  # as the kernel does when its launcher is killed
    run_directory.remove_leftovers(str(tmp_path))
    assert before - set(os.listdir(tmp_path)) == {left.name}
    os.close(claims[0] or -1)


def test_the_next_launcher_looks_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        first = run_directory.make_run_directory()
        claim = run_directory.claim(first)
        assert claim is not None
        second = run_directory.make_run_directory()
        assert os.path.exists(first)
        os.close(claim)
        shutil.rmtree(run_directory.make_run_directory())
        assert os.listdir(place) == [os.path.basename(second)], "it wasn't claimed"
