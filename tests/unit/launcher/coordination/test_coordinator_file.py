"""`coordinator.json`: written whole, trusted only where this user has written it, for this job."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from megatron_ft.launcher.coordination.coordinator_file import CoordinatorFile
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import until

JOB = "id/0//train.py"


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


def recorded(reactor: Reactor, directory: Path, address: str = "node2:4711", decision: int = 3) -> Path:
    path = directory / "coordinator.json"
    file = CoordinatorFile(reactor, str(directory), JOB)
    file.write(address, decision)
    until(reactor, lambda: not file._is_writing)
    return path


def read(reactor: Reactor, directory: Path, job: str = JOB) -> list[str]:
    named: list[str] = []
    file = CoordinatorFile(reactor, str(directory), job)
    file.read(named.append)
    until(reactor, lambda: not file._is_reading)
    return named


def test_file_names_job_address_and_decision_and_is_this_users_alone(reactor: Reactor, tmp_path: Path) -> None:
    path = recorded(reactor, tmp_path)
    assert json.loads(path.read_text()) == {"version": 1, "job": JOB, "address": "node2:4711", "decision": 3}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["coordinator.json"]
    assert read(reactor, tmp_path) == ["node2:4711"]


def test_last_of_several_writes_at_once_is_kept(reactor: Reactor, tmp_path: Path) -> None:
    file = CoordinatorFile(reactor, str(tmp_path), JOB)
    for decision in range(5):
        file.write("node2:4711", decision)
    until(reactor, lambda: not file._is_writing)
    assert json.loads((tmp_path / "coordinator.json").read_text())["decision"] == 4


def test_file_of_another_job_names_nothing(reactor: Reactor, tmp_path: Path) -> None:
    recorded(reactor, tmp_path)
    assert read(reactor, tmp_path, "other/0//train.py") == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"version": 2, "job": "id/0//train.py", "address": "a:1", "decision": 0}',
        '{"version": 1, "job": "id/0//train.py", "address": 7, "decision": 0}',
        '{"version": 1, "job": "id/0//train.py"}',
    ],
)
def test_file_that_is_no_note_names_nothing(reactor: Reactor, tmp_path: Path, text: str) -> None:
    (tmp_path / "coordinator.json").write_text(text)
    assert read(reactor, tmp_path) == []


def test_link_in_its_place_is_not_followed(reactor: Reactor, tmp_path: Path) -> None:
    target = recorded(reactor, tmp_path).rename(tmp_path / "elsewhere")
    (tmp_path / "coordinator.json").symlink_to(target)
    before = target.read_text()
    assert read(reactor, tmp_path) == []
    recorded(reactor, tmp_path, "node3:1")
    assert target.read_text() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_file_of_another_user_is_neither_trusted_nor_replaced(reactor: Reactor, tmp_path: Path) -> None:
    path = recorded(reactor, tmp_path)
    os.chown(path, 65534, 65534)
    assert read(reactor, tmp_path) == []
    recorded(reactor, tmp_path, "node3:1")
    assert json.loads(path.read_text())["address"] == "node2:4711"


def test_fifo_in_its_place_is_not_waited_for(reactor: Reactor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "coordinator.json")
    assert read(reactor, tmp_path) == []
    recorded(reactor, tmp_path)
    assert stat.S_ISFIFO((tmp_path / "coordinator.json").stat().st_mode)


def test_directory_that_is_missing_does_no_harm(reactor: Reactor, tmp_path: Path) -> None:
    recorded(reactor, tmp_path / "missing")
    assert read(reactor, tmp_path / "missing") == []
    file = CoordinatorFile(reactor, None, JOB)
    file.write("a:1", 0)
    file.read(lambda _address: pytest.fail("nothing can be read"))
