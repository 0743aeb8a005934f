"""The launcher's event loop: descriptors, timers, and blocking work, in one thread."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import threading
import time
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
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = itertools.count()

    def watch(self, fd: int, callback: Callable[[], object], priority: Priority = Priority.MESSAGE) -> None:
        """Call back each time ``fd`` is readable, until ``unwatch``."""
        self._selector.register(fd, selectors.EVENT_READ, (priority, callback))

    def watch_room(self, fd: int, wanted: bool) -> None:
        """Start or stop calling back also when the watched ``fd`` accepts bytes, or has failed to connect."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(fd, events, self._selector.get_key(fd).data)

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; call it before the descriptor is closed. Unknown ones are ignored."""
        try:
            self._selector.unregister(fd)
        except (KeyError, ValueError):
            pass  # not watched, or closed by an error: either way no callback is left

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once, ``delay_s`` seconds from now, at the earliest when events are served next.

        Otherwise a timer that is always overdue would block everything else.
        """
        timer = Timer(time.monotonic() + max(0.0, delay_s), callback)
        heapq.heappush(self._timers, (timer.at_s, next(self._number), timer))
        return timer

    def run_once(self, timeout_s: float | None) -> None:
        """Wait until something happens, at most ``timeout_s`` seconds (None: for ever), and serve it."""
        ready = self._selector.select(self._bounded(timeout_s))
        for key, _ in sorted(ready, key=lambda item: item[0].data[0]):
            current = self._selector.get_map().get(key.fd)
            # an earlier callback may have closed it; its number may even be reused by now
            if current is not None and current.data is key.data:
                key.data[1]()
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
        call = _BlockingCall(function)
        self.watch(call.done_fd, lambda: None)
        try:
            call.thread.start()
            while not call.finished:
                if check is not None:
                    check()
                self.run_once(_CHECK_S)
        finally:
            self.unwatch(call.done_fd)
            if call.finished:
                call.thread.join()
                os.close(call.done_fd)
        return call.result()

    def call_in_thread(self, function: Callable[[], T], done: Callable[[Callable[[], T]], None]) -> None:
        """Run a blocking function in a thread of its own, and return at once.

        ``done`` is called from the loop, with a function that returns or raises what the first one did.

        Raises:
            OSError: no descriptor is free, or it can't be watched.
            RuntimeError: no thread can be started.
        """
        call = _BlockingCall(function)

        def take() -> None:
            self.unwatch(call.done_fd)
            call.thread.join()
            os.close(call.done_fd)
            done(call.result)

        try:
            self.watch(call.done_fd, take)
            call.thread.start()
        except (OSError, RuntimeError):  # the kernel has no room for another watched descriptor, or thread
            self.unwatch(call.done_fd)
            os.close(call.done_fd)
            raise

    def close(self) -> None:
        """Drop all timers and descriptors."""
        self._timers.clear()
        self._selector.close()

    def _bounded(self, timeout_s: float | None) -> float | None:
        if not self._timers:
            return timeout_s
        left = max(0.0, self._timers[0][0] - time.monotonic())
        return left if timeout_s is None else min(left, timeout_s)


class _BlockingCall:
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: object = None
        self._error: BaseException | None = None
        self.finished = False
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # a daemon: an abandoned one must not keep the launcher alive
        self.thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}blocking_call", daemon=True)

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked, whatever it is
            self._error = error
        self.finished = True
        os.eventfd_write(self.done_fd, 1)

    def result(self) -> T:  # type: ignore[type-var]
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
