"""Work of a rank that is done in threads: by whom, and what becomes of failures."""

from __future__ import annotations

import threading

import pytest

from megatron_ft.memory.base.threads import each_of

BOUND_S = 20.0


@pytest.mark.parametrize("most", [0, 1])
def test_calling_thread_does_what_is_left_if_no_further_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    start, started, done = threading.Thread.start, list[threading.Thread](), list[int]()

    def refuse(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        each_of([*range(10)], done.append, 4)
    assert sorted(done) == [*range(10)]
    assert not any(each.is_alive() for each in started)


def test_failure_of_a_thread_is_raised_in_the_calling_one_and_ends_the_others() -> None:
    both_began, helpers, done = threading.Barrier(2), list[threading.Thread](), list[int]()

    def work(item: int) -> None:
        if (thread := threading.current_thread()) is not threading.main_thread():
            helpers.append(thread)
            both_began.wait(BOUND_S)
            raise ValueError("an item")
        if not done:
            both_began.wait(BOUND_S)
            helpers[0].join(BOUND_S)
        done.append(item)

    with pytest.raises(ValueError, match="an item"):
        each_of([*range(10)], work, 2)
    assert len(done) == 1
