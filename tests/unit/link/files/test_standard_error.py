"""Lines on standard error: in order, and without waiting for who doesn't read them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from megatron_ft.link.standard_error import StandardError

SOON_S = 30.0
LINE = "x" * 1000


@contextlib.contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """A standard error that is full; what was written to it is read from this."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with open(write_fd, "w") as stream, open(read_fd) as reader, monkeypatch.context() as patch:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_fd, b"." * 4096)
        os.set_blocking(write_fd, True)
        patch.setattr(sys, "stderr", stream)  # here: the test runner puts its own there before each test
        yield reader


def test_flush_of_the_stream_is_not_held_up_by_an_unread_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the exit Python flushes it, and `logging` does."""
    output = StandardError()
    with unread(monkeypatch):
        output.put(LINE)
        flushing = threading.Thread(target=sys.stderr.flush, daemon=True)
        flushing.start()
        flushing.join(SOON_S)
        assert not flushing.is_alive()


def test_a_fork_writes_its_own_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = StandardError()
    output.put("parent")
    before = threading.enumerate()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a fork, which has no thread
    output.put("child")
    output.finish()
    assert capfd.readouterr().err.split() == ["parent", "child"]
    assert set(threading.enumerate()) > set(before)


def test_lines_for_which_there_is_no_room_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ft.link.standard_error.MOST_CHARACTERS", 2500)
    output = StandardError()
    with unread(monkeypatch) as reader:
        for number in range(4):
            output.put(f"{number}{LINE}")
        assert [reader.readline().lstrip(".")[0] for _ in range(2)] == ["0", "1"]
        output.finish()
        output.put("end")
        assert reader.readline() == "(2 lines lost: standard error was not read)\n"
        assert reader.readline() == "end\n"


def test_a_process_that_has_no_thread_to_spare_writes_itself(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    output = StandardError()
    output.put("still told")
    output.finish()
    assert capfd.readouterr().err == "still told\n"


def test_a_stream_that_is_gone_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = (tmp_path / "err").open("w")
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        output = StandardError()
        output.put("not seen")
        output.finish()
