"""Run directories that nobody was left to remove: known by a lock that nobody holds."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from megatron_ft.launcher.base import directories, leftover_run_dirs


def run_directory(place: Path, name: str, *, mode: int = 0o700) -> Path:
    path = place / f"megatron_ft-{name}"
    path.mkdir()
    path.chmod(mode)
    (path / "launcher.sock").touch()
    return path


def test_what_a_killed_launcher_held_is_removed_and_nothing_else(tmp_path: Path) -> None:
    held, left = run_directory(tmp_path, "held"), run_directory(tmp_path, "left")
    run_directory(tmp_path, "unclaimed")  # of a launcher that has just begun, or without locks
    (tmp_path / "megatron_ft-file").touch()
    (tmp_path / "megatron_ft-link").symlink_to(held)
    others = run_directory(tmp_path, "readable", mode=0o755)
    os.close(leftover_run_dirs.claim(str(others)) or -1)
    foreign = run_directory(tmp_path, "elsewhere")
    (foreign / "owner").write_text(json.dumps(["another-host", "another-boot"]))
    broken = run_directory(tmp_path, "broken")
    (broken / "owner").write_text("{")
    (tmp_path / "mine").mkdir()
    claims = [leftover_run_dirs.claim(str(path)) for path in (held, left)]
    before = set(os.listdir(tmp_path))
    leftover_run_dirs.remove_leftovers(str(tmp_path), "megatron_ft-")
    assert set(os.listdir(tmp_path)) == before
    os.close(claims[1] or -1)  # as the kernel does when its launcher is killed
    leftover_run_dirs.remove_leftovers(str(tmp_path), "megatron_ft-")
    assert before - set(os.listdir(tmp_path)) == {left.name}
    os.close(claims[0] or -1)


def test_a_host_that_was_started_again_and_a_container_of_this_one(tmp_path: Path) -> None:
    host, boot = leftover_run_dirs._here()
    for name, owner in (("rebooted", [host, "another-boot"]), ("container", ["another-host", boot])):
        (run_directory(tmp_path, name) / "owner").write_text(json.dumps(owner))
    leftover_run_dirs.remove_leftovers(str(tmp_path), "megatron_ft-")
    assert os.listdir(tmp_path) == []


def test_the_next_launcher_looks_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        first = directories.make_run_directory()
        claim = leftover_run_dirs.claim(first)
        assert claim is not None
        second = directories.make_run_directory()
        assert os.path.exists(first)
        os.close(claim)
        directories.remove_run_directory(directories.make_run_directory())
        assert os.listdir(place) == [os.path.basename(second)], "it wasn't claimed"
