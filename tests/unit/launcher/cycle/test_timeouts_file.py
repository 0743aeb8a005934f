"""The launcher reads and writes the file of learned timeouts beside its loop; what it can't read it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.launcher.cycle import timeouts_file
from megatron_ft.launcher.cycle.timeouts_file import TimeoutsFile, read, write
from megatron_ft.learning.launcher_part import LearningOptions, ReadState, StateRead, StateWritten, WriteState
from megatron_ft.learning.messages import Moment
from megatron_ft.learning.state import LearnedState, LearnedTimeout
from megatron_ft.link.reactor import Reactor

OPTIONS = LearningOptions()
NOT_WRITTEN = "leaving it alone, timeouts learned in this run are not written"


def state() -> LearnedState:
    """Content of a file."""
    return LearnedState(timeouts={"step": LearnedTimeout(calculated_s=12.0)})


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt" / "ft_state.json")


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    reactor.close()


@pytest.mark.parametrize("content", ["", "{", '{"schema": "megatron_ft.ft_state", "schema_version": 2, "sections": 3}'])
def test_file_that_does_not_parse_is_set_aside_by_one_launcher(path: str, content: str) -> None:
    os.mkdir(os.path.dirname(path))
    Path(path).write_text(content)
    left = read(path, sets_aside=False)
    assert left.problem.endswith(": leaving it alone")
    assert left.state is None
    assert left.may_write
    assert Path(path).read_text() == content
    found = read(path, sets_aside=True)
    assert found.problem.endswith(f": moved to {path}.corrupt-1")
    assert found.may_write
    assert Path(f"{path}.corrupt-1").read_text() == content


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_file_that_cant_be_read_is_left_alone(path: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write(WriteState(path, state()), OPTIONS)
    before = Path(path).read_text()

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", fail)
        found = read(path, sets_aside=True)
    assert found == StateRead(path, None, f"{path} can't be read: {os.strerror(number)}: {NOT_WRITTEN}", False)
    assert Path(path).read_text() == before


def test_file_of_a_newer_version_is_left_alone(path: str) -> None:
    write(WriteState(path, state()), OPTIONS)
    text = json.dumps({**json.loads(Path(path).read_text()), "schema_version": 99})
    Path(path).write_text(text)
    found = read(path, sets_aside=True)
    assert not found.may_write
    assert found.problem.startswith(f"{path} schema_version is 99")
    assert Path(path).read_text() == text


def test_directory_that_refuses_the_file_is_one_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(timeouts_file, "write_state", fail)
    text = f"learned timeouts can't be written to {path}: Read-only file system"
    assert write(WriteState(path, state(), Moment.END), OPTIONS) == StateWritten(False, text, Moment.END)


def test_results_are_heard_on_the_loop_and_nothing_waits(path: str, reactor: Reactor) -> None:
    heard: list[object] = []
    file = TimeoutsFile(reactor, heard.append, OPTIONS)
    file.act(WriteState(path, state(), None))
    file.act(ReadState(path))
    assert heard == []
    assert reactor.run_until(lambda: len(heard) == 2, time.monotonic() + 10.0)
    assert isinstance(heard[0], StateWritten)
    assert isinstance(heard[1], StateRead)
    file.close()


def test_exit_waits_for_a_write_but_not_for_ever(path: str, reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts_file, "LAST_WRITE_S", 0.3)
    release = threading.Event()
    monkeypatch.setattr(timeouts_file, "write_state", lambda *_args: release.wait(30.0))
    file = TimeoutsFile(reactor, lambda _result: None, OPTIONS)
    file.act(WriteState(path, state(), None))
    began_s = time.monotonic()
    file.close()
    assert 0.25 < time.monotonic() - began_s < 5.0
    release.set()


def test_exit_does_not_lose_a_write_that_was_just_begun(path: str, reactor: Reactor) -> None:
    file = TimeoutsFile(reactor, lambda _result: None, OPTIONS)
    file.act(WriteState(path, state(), None))
    file.close()
    assert read(path, sets_aside=False).state is not None
