"""The directory of a launcher's sockets is mended, reported once for each time it was deleted, and removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from megatron_ft.launcher.base.run_directory import RunDirectory


class Socket:
    """A file in the place of a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_lost(self) -> bool:
        return not self.path.exists()

    def listen_again(self) -> None:
        self.path.touch()


def test_what_was_deleted_is_recreated_and_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    directory = RunDirectory(said.append)
    sockets = [Socket(Path(directory.path, name)) for name in ("launcher.sock", "monitor-0.sock")]
    for each in sockets:
        directory.add(each)
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
    directory.remove()
    directory.release()
    directory.release()
    assert not os.path.lexists(directory.path)
