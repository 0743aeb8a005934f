"""Directories that are made for logs and sockets: which, with which rights, and when they are removed or made again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.launcher.base import directories
from megatron_ft.launcher.base.directories import RunDirectory
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import StateFile

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")


@pytest.fixture
def generous_umask() -> Iterator[None]:
    """Who has it leaves everything open to everybody that isn't closed on purpose."""
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory, not there yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    return tmp_path / "home" / "state"


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def default_place() -> str:
    return directories.make_log_directory(ft_log_dir=None, torch_log_dir=None, run_id="a/b c")


@pytest.mark.usefixtures("generous_umask")
def test_directories_and_files_we_make_cannot_be_written_by_others(tmp_path: Path, state: Path) -> None:
    asked = tmp_path / "a" / "b" / "c"
    assert directories.make_log_directory(ft_log_dir=str(asked), torch_log_dir=None, run_id="") == str(asked)
    assert (mode(asked), mode(asked.parent), mode(asked.parent.parent)) == (0o700, 0o755, 0o755)
    default = Path(default_place())
    assert default.parent.parent == state
    assert [mode(default), mode(default.parent), mode(state), mode(state.parent)] == [0o700, 0o700, 0o700, 0o755]
    shutil.rmtree(run_dir := directories.make_run_directory())
    assert not os.path.exists(run_dir)
    carry_out(StateFile(str(tmp_path / "ft_state.json"), {}))
    assert not mode(tmp_path / "ft_state.json") & stat.S_IWOTH


def test_a_log_directory_that_cannot_be_made_is_no_mistake(state: Path) -> None:
    with pytest.raises(OSError, match=r"--ft-log-dir: /proc/no can't be written: ") as caught:
        directories.make_log_directory(ft_log_dir="/proc/no", torch_log_dir=None, run_id="")
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(OSError, match=r"--log-dir: /proc/no/megatron_ft can't be written: "):
        directories.make_log_directory(ft_log_dir=None, torch_log_dir="/proc/no", run_id="")
    state.parent.mkdir()
    state.touch()
    with pytest.raises(OSError, match="the user's state directory"):
        default_place()


def test_a_log_directory_for_all_users_is_told_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "can be written by all users" in (directories.doubt_about(str(tmp_path)) or "")
    tmp_path.chmod(0o1777)  # as /tmp: each may remove only what is his
    assert directories.doubt_about(str(tmp_path)) is None
    directories.make_log_directory(ft_log_dir=str(tmp_path), torch_log_dir=None, run_id="")
    assert mode(tmp_path) == 0o1777, "it stays as it is"


@needs_root
def test_a_log_directory_of_another_user_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "his").mkdir(mode=0o700)
    os.chown(tmp_path / "his", STRANGER, STRANGER)
    os.symlink(tmp_path, tmp_path / "link")
    os.chown(tmp_path / "link", STRANGER, STRANGER, follow_symlinks=False)
    for name in ("his", "link"):
        assert f"belongs to another user (uid {STRANGER})" in (directories.doubt_about(str(tmp_path / name)) or "")


@needs_root
@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_the_name_in_the_state_directory_is_taken_by_another_user(state: Path, tmp_path: Path, kind: str) -> None:
    state.mkdir(parents=True)
    state.chmod(0o1777)  # XDG_STATE_HOME=/tmp, say
    taken, trap = state / "megatron_ft", tmp_path / "trap"
    trap.mkdir()
    make = {"directory": taken.mkdir, "link": lambda: taken.symlink_to(trap), "file": taken.touch}
    make[kind]()
    os.chown(taken, STRANGER, STRANGER, follow_symlinks=False)
    logs = Path(default_place())
    assert logs.parent.parent == state
    assert logs.parent != taken
    assert mode(logs.parent) == 0o700
    assert os.listdir(trap) == []


def test_user_without_a_home_is_told_to_give_a_log_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "~")  # what expanduser makes of a user that isn't in the password file
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(OSError, match=r"no home directory.*--ft-log-dir"):
        default_place()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # to be ignored
    assert default_place().startswith(f"{tmp_path}/home/.local/state/megatron_ft/")
    assert os.listdir(tmp_path) == ["home"]


def test_deleted_run_directory_is_recreated_and_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    directory = RunDirectory(said.append)
    sockets = [Path(directory.path, name) for name in ("launcher.sock", "monitor-0.sock")]
    made: list[Any] = [SimpleNamespace(path=str(path), listener=True, listen_again=path.touch) for path in sockets]
    directory.sockets = [*made, SimpleNamespace(path=f"{directory.path}/keeper.sock", listener=None)]
    for path in sockets:
        path.touch()
    directory.mend()
    assert said == []
    for times in (1, 2):
        shutil.rmtree(directory.path)
        directory.mend()
        assert all(path.exists() for path in sockets)
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
            run_dir = directories.make_run_directory()
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
    os.close(directories.claim(str(others)) or -1)
    foreign = made(tmp_path, "elsewhere")
    (foreign / "owner").write_text(json.dumps(["another-host", "another-boot"]))
    broken = made(tmp_path, "broken")
    (broken / "owner").write_text("{")
    (tmp_path / "mine").mkdir()
    claims = [directories.claim(str(path)) for path in (held, left)]
    before = set(os.listdir(tmp_path))
    directories.remove_leftovers(str(tmp_path))
    assert set(os.listdir(tmp_path)) == before
    os.close(claims[1] or -1)  # as the kernel does when its launcher is killed
    directories.remove_leftovers(str(tmp_path))
    assert before - set(os.listdir(tmp_path)) == {left.name}
    os.close(claims[0] or -1)
