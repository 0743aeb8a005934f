"""The event loop: order of what is ready at once, timers, and work that blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_ft.link.reactor import THREAD_PREFIX, Priority, Reactor


@pytest.fixture
def ready() -> Iterator[list[int]]:
    """Three descriptors that can be read."""
    fds = [os.eventfd(1) for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_messages_are_served_before_deaths(reactor: Reactor, ready: list[int]) -> None:
    served: list[str] = []
    reactor.watch(ready[0], lambda: served.append("death"), Priority.DEATH)
    reactor.watch(ready[1], lambda: served.append("message"))
    reactor.watch(ready[2], lambda: served.append("signal"), Priority.SIGNAL)
    reactor.run_once(1)
    assert served == ["signal", "message", "death"]


def test_callback_that_was_dropped_is_not_served_though_its_number_was_given_away(
    reactor: Reactor, ready: list[int]
) -> None:
    served: list[str] = []

    def first() -> None:
        reactor.unwatch(ready[2])
        reactor.unwatch(ready[2])  # forgetting twice is fine
        reactor.unwatch(ready[1])
        reactor.watch(ready[1], lambda: served.append("new"))

    reactor.watch(ready[0], first, Priority.SIGNAL)
    reactor.watch(ready[1], lambda: served.append("old"))
    reactor.watch(ready[2], lambda: served.append("forgotten"))
    reactor.run_once(1)
    assert served == []
    reactor.run_once(1)
    assert {*served} <= {"new"}


def test_timers_are_served_in_order_unless_cancelled(reactor: Reactor) -> None:
    served: list[int] = []
    reactor.call_later(0.02, lambda: served.append(2))
    reactor.call_later(0.01, lambda: served.append(1))
    reactor.call_later(0.0, lambda: served.append(0)).cancel()
    assert reactor.run_until(lambda: len(served) == 2, time.monotonic() + 5)
    assert served == [1, 2]


def test_a_timer_that_is_always_overdue_keeps_nothing_else_waiting(reactor: Reactor, ready: list[int]) -> None:
    served: list[str] = []

    def ring() -> None:
        served.append("rung")
        assert len(served) < 1000
        reactor.call_later(-10.0, ring)

    reactor.call_later(0.0, ring)
    reactor.run_once(0.0)
    assert served == ["rung"]
    reactor.watch(ready[0], lambda: (os.eventfd_read(ready[0]), served.append("ready")))
    reactor.run_once(None)
    assert served == ["rung", "ready", "rung"]


def test_run_until_ends_at_the_deadline(reactor: Reactor) -> None:
    start = time.monotonic()
    assert not reactor.run_until(lambda: False, start + 0.05)
    assert 0.05 <= time.monotonic() - start < 1


def test_blocking_call_can_be_given_up(reactor: Reactor) -> None:
    release, asked = threading.Event(), time.monotonic() + 0.05
    before = threading.enumerate()  # other tests give calls up, too
    reactor.call_later(0.05, lambda: None)

    def check() -> None:
        if time.monotonic() >= asked:
            raise InterruptedError("asked to stop")

    with pytest.raises(InterruptedError):
        reactor.call_blocking(release.wait, check)
    begun = [thread for thread in threading.enumerate() if thread not in before]
    (stuck,) = [thread for thread in begun if thread.name.startswith(THREAD_PREFIX)]
    assert stuck.daemon
    release.set()
    stuck.join(5)


def test_result_or_error_of_a_thread_reaches_the_loop(reactor: Reactor) -> None:
    before = len(os.listdir("/proc/self/fd"))
    go = threading.Event()
    results: list[Callable[[], object]] = []
    reactor.call_in_thread(lambda: go.wait(5) and "value", results.append)
    reactor.call_in_thread(lambda: {}["lost"], results.append)
    assert reactor.run_until(lambda: bool(results), time.monotonic() + 5)
    with pytest.raises(KeyError, match="lost"):
        results[0]()
    go.set()
    assert reactor.run_until(lambda: len(results) == 2, time.monotonic() + 5)
    assert results[1]() == "value"
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer: what earlier tests left was collected meanwhile


def test_calls_that_threads_post_are_made_in_order_also_after_one_that_raises(reactor: Reactor) -> None:
    made: list[int] = []
    reactor.post(lambda: made.append(1))
    reactor.post(lambda: {}["lost"])
    reactor.post(lambda: made.append(2))
    with pytest.raises(KeyError, match="lost"):
        reactor.run_until(lambda: len(made) == 2, time.monotonic() + 5)
    assert reactor.run_until(lambda: len(made) == 2, time.monotonic() + 5)
    assert made == [1, 2]


def test_callback_that_runs_the_loop_itself_serves_what_was_posted_once(reactor: Reactor, ready: list[int]) -> None:
    made: list[int] = []
    reactor.watch(ready[0], lambda: (os.eventfd_read(ready[0]), reactor.run_once(0)), Priority.SIGNAL)
    reactor.post(lambda: made.append(1))
    reactor.run_once(1)
    reactor.run_once(0)
    assert made == [1]


def test_thread_gets_what_the_loop_answers(reactor: Reactor) -> None:
    assert reactor.call_blocking(lambda: reactor.call_in_loop(threading.current_thread)) is threading.main_thread()


def test_late_result_for_a_closed_loop_goes_nowhere() -> None:
    closed, release, threads = Reactor(), threading.Event(), threading.enumerate()
    closed.call_in_thread(release.wait, lambda _: pytest.fail("called by a closed loop"))
    (thread,) = [each for each in threading.enumerate() if each not in threads]
    closed.close()
    fd = os.eventfd(0, os.EFD_NONBLOCK)  # has the number of the loop's
    release.set()
    thread.join(5)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)
