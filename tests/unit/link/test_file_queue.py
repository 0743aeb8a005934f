"""Whoever has something done with files waits as long as he said, whatever the file server does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from megatron_ft.link.file_queue import FileQueue

SOON_S = 30.0
"""For what is done at once, on a machine however busy."""


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set, the file server answers."""
    event = threading.Event()
    yield event
    event.set()


def test_jobs_are_done_in_order_and_once_all_are_nobody_waits(capsys: pytest.CaptureFixture[str]) -> None:
    files, done = FileQueue(), list[int]()
    files.do(lambda: [][0])
    for number in range(1000):
        assert files.do(lambda number=number: done.append(number))
    assert files.finish(SOON_S)
    assert done == list(range(1000))
    assert not files.do(lambda: done.append(-1))
    assert "IndexError" in capsys.readouterr().err


def test_a_call_returns_what_the_job_does_or_raises_what_it_raises() -> None:
    files = FileQueue()
    assert files.call(lambda: 7, 0, bound_s=SOON_S) == 7
    with pytest.raises(FileNotFoundError):
        files.call(lambda: len(os.listdir("/nowhere")), 0, bound_s=SOON_S)
    assert files.finish(SOON_S)


def test_caller_that_gave_up_once_does_not_wait_until_the_job_is_done(answers: threading.Event) -> None:
    files, begun = FileQueue(), threading.Event()
    assert files.call(lambda: (begun.set(), answers.wait(60)), None, bound_s=0.01) is None
    assert files.call(lambda: 7, 0, bound_s=10**6) == 0  # at once, else this test never ends
    assert begun.wait(SOON_S)
    assert files.stands_for_s() > 0
    answers.set()
    done = threading.Event()
    files.do(done.set)
    assert done.wait(SOON_S)
    assert files.call(lambda: 7, 0, bound_s=SOON_S) == 7
    assert files.finish(SOON_S)


def test_jobs_that_wait_are_bounded_in_bytes(answers: threading.Event) -> None:
    files, done = FileQueue(most_bytes=100), list[int]()
    assert files.do(lambda: answers.wait(60))
    taken = [files.do(lambda number=number: done.append(number), 30) for number in range(10)]
    assert taken == [True] * 3 + [False] * 7
    assert not files.finish(0.01)
    answers.set()
    assert files.finish(SOON_S)
    assert done == [0, 1, 2]


def test_job_that_has_taken_the_bound_already_is_not_waited_for(answers: threading.Event) -> None:
    files, begun = FileQueue(), threading.Event()
    files.do(lambda: (begun.set(), answers.wait(60)))
    assert begun.wait(SOON_S)
    assert not files.wait(0.1)
    began = time.monotonic()
    assert not files.wait(0.1)
    assert time.monotonic() - began < 0.05
    assert not files.wait(files.stands_for_s() + 0.1)


def test_a_signal_handler_may_have_a_job_at_any_moment() -> None:
    """In the middle of a job's being handed over, say."""
    files, done = FileQueue(), list[str]()

    def handle(_number: int, _frame: FrameType | None) -> None:
        files.do(lambda: done.append("handler"))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with files._changed:
            os.kill(os.getpid(), signal.SIGUSR1)
            files.do(lambda: done.append("here"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert files.finish(SOON_S)
    assert sorted(done) == ["handler", "here"]
