"""The event loop of a process: descriptors, timers, and what other threads hand over, in one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

THREAD_PREFIX = "ft_launcher_"
"""Prefix of threads that may wait inside torch for longer than the launcher lives."""

_CHECK_S = 1.0

T = TypeVar("T")


class Priority(IntEnum):
    """Order of serving descriptors that are ready at once.

    A verdict is sent before the kill, so messages are read before deaths: the cause is known when the death is handled.
    """

    SIGNAL = 0
    MESSAGE = 1
    DEATH = 2


class Timer:
    """A callback at a time; ``cancel`` drops it."""

    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """Waits for descriptors and timers and calls back. Times are ``time.monotonic`` seconds."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Priority, Callable[[], object]]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()
        self._posted: deque[Callable[[], object]] = deque()
        # counts what was posted: a callback that raises leaves the others for the next round
        self._posted_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._closing = threading.RLock()
        self.watch(self._posted_fd, self._serve_posted)

    def watch(self, fd: int, callback: Callable[[], object], priority: Priority = Priority.MESSAGE) -> None:
        """Call back each time ``fd`` is readable, until ``unwatch``."""
        self._epoll.register(fd, select.EPOLLIN)
        self._watched[fd] = (priority, callback)

    def watch_room(self, fd: int, wanted: bool) -> None:
        """Start or stop calling back also when the watched ``fd`` accepts bytes, or has failed to connect."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; call it before the descriptor is closed. Unknown ones are ignored."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # it was closed by an error
                self._epoll.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once, ``delay_s`` seconds from now, at the earliest when events are served next.

        Otherwise a timer that is always overdue would block everything else.
        """
        timer = Timer(time.monotonic() + max(0.0, delay_s), callback)
        heapq.heappush(self._timers, (timer.at_s, next(self._number), timer))
        return timer

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call back, in the order of posting. For any thread; it does nothing once the loop is closed."""
        with self._closing:
            if self._posted_fd >= 0:
                self._posted.append(callback)
                os.eventfd_write(self._posted_fd, 1)

    def call_in_loop(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns when the loop calls it. For other threads only."""
        answer: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.post(lambda: answer.put(function()))
        return answer.get()

    def run_once(self, timeout_s: float | None) -> None:
        """Wait until something happens, at most ``timeout_s`` seconds (None: for ever), and serve it."""
        if self._timers:
            left_s = max(0.0, self._timers[0][0] - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        # a wait that a signal has interrupted may return nothing although its wake-up descriptor is ready
        most = len(self._watched)
        ready = self._epoll.poll(timeout_s, most) or self._epoll.poll(0, most)
        found = [(fd, self._watched[fd]) for fd, _ in ready if fd in self._watched]
        for fd, watched in sorted(found, key=lambda each: each[1][0]):
            # an earlier callback may have closed it; its number may even be reused by now
            if self._watched.get(fd) is watched:
                watched[1]()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def run_until(self, condition: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Serve until ``condition()`` or the deadline. Return False at the deadline."""
        while not condition():
            left = None if deadline_s is None else deadline_s - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.run_once(left)
        return True

    def call_blocking(self, function: Callable[[], T], check: Callable[[], None] | None = None) -> T:
        """Run a blocking function in a thread of its own, and serve everything else meanwhile.

        ``check`` is called after each event, and each second; if it raises, the thread is abandoned.

        Raises:
            any exception of ``function`` or ``check``.
        """
        results: list[Callable[[], T]] = []
        self.call_in_thread(function, results.append)
        while not results:
            if check is not None:
                check()
            self.run_once(_CHECK_S)
        return results[0]()

    def call_in_thread(self, function: Callable[[], T], done: Callable[[Callable[[], T]], None]) -> None:
        """Run a blocking function in a thread of its own, and return at once.

        ``done`` is called from the loop, with a function that returns or raises what the first one did.

        Raises:
            RuntimeError: no thread can be started.
        """

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asked, whatever it is
                errors.append(error)
            self.post(take)

        def take() -> None:
            thread.join()
            done(result)

        def result() -> T:
            for error in errors:
                raise error
            return results[0]

        results: list[T] = []
        errors: list[BaseException] = []

        # a daemon: an abandoned one must not keep the process alive
        thread = threading.Thread(target=run, name=f"{THREAD_PREFIX}blocking_call", daemon=True)
        thread.start()

    def close(self) -> None:
        """Drop all timers and descriptors, and what threads have handed over."""
        self._timers.clear()
        self._watched.clear()
        self._epoll.close()
        with self._closing:
            os.close(self._posted_fd)
            self._posted_fd = -1

    def _serve_posted(self) -> None:
        try:
            os.eventfd_read(self._posted_fd)
        except BlockingIOError:
            return  # a callback of this round has run the loop itself, and served it
        self._posted.popleft()()
