"""Files in shared directories: what another user put in their place is neither read, nor followed, nor waited for."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.launcher import outcome
from megatron_ft.link.files.own_files import ForeignFileError, open_own_folder, open_regular, read_own, replace_own

OTHER = 65534
PLACED: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "symbolic link": lambda path: path.symlink_to("/etc/passwd"),
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.mark.parametrize("kind", PLACED)
def test_a_file_that_is_not_regular_stays_where_it_is(tmp_path: Path, kind: str) -> None:
    """It is neither opened, nor waited for."""
    path = tmp_path / "result.json"
    PLACED[kind](path)
    before = os.lstat(path)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(ForeignFileError, match=f"is a {kind}"):
            open_regular(str(path), flags)
    if kind != "symbolic link":
        with pytest.raises(ForeignFileError, match=f"is a {kind}"):
            replace_own(str(path), b"x")
    assert os.lstat(path) == before
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_link_of_our_own_is_replaced_and_its_target_is_not(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "result.json"
    target.write_text("kept")
    path.symlink_to(target)
    replace_own(str(path), b"new")
    assert target.read_text() == "kept"
    assert stat.S_ISREG(os.lstat(path).st_mode)
    assert read_own(str(path)) == b"new"
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600


@needs_root
def test_a_file_of_another_user_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("theirs")
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ForeignFileError, match=f"is a file of another user \\({OTHER}\\)"):
        read_own(str(path))
    with pytest.raises(ForeignFileError, match=f"is a file of another user \\({OTHER}\\)"):
        replace_own(str(path), b"ours")
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["result.json"]


@needs_root
def test_a_link_of_another_user_in_a_sticky_directory_is_left_alone(tmp_path: Path) -> None:
    """As in /tmp: the directory is neither ours nor theirs."""
    shared, target = tmp_path / "shared", tmp_path / "target"
    shared.mkdir()
    target.write_text("kept")
    (shared / "result.json").symlink_to(target)
    os.lchown(shared / "result.json", OTHER, OTHER)
    os.chown(shared, OTHER - 1, OTHER - 1)
    shared.chmod(0o1777)
    with pytest.raises(ForeignFileError, match=f"is a symbolic link of another user \\({OTHER}\\)"):
        replace_own(str(shared / "result.json"), b"ours")
    assert target.read_text() == "kept"


@needs_root
def test_a_directory_of_another_user_takes_no_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "evidence"
    path.mkdir()
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ForeignFileError, match="is a directory of another user"):
        open_own_folder(str(path))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ForeignFileError, match="is a symbolic link"):
        open_own_folder(str(link))
    os.close(open_own_folder(str(tmp_path / "new")))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_fifo_in_place_of_the_result_costs_one_line_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "result.json", []
    os.mkfifo(path)
    monkeypatch.setattr(outcome.LAUNCHER, "put", lambda _level, line: said.append(line))
    life = outcome.Life(job="j", command=("x",), began=outcome.utc(0))
    for _ in range(3):
        outcome.rewrite(str(path), lambda lives: lives.begun(life))
    assert said == [f"megatron_ft: {path} is a FIFO: it is neither read nor written"]
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
