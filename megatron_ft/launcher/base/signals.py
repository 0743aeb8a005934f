"""Signals to the launcher, including requests to stop.

A handler only notes the signal and wakes the event loop. A request to stop interrupts waits for other nodes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from megatron_ft.launcher.rules.events import Continued, StopAsked
from megatron_ft.link.base.signal_rules import Asked, SecondRequest
from megatron_ft.link.reactor import Reactor

T = TypeVar("T")


class SignalWatch:
    """Notes signals that ask the launcher to stop, and others that are forwarded to the ranks.

    ``fileno`` is readable after one, and after SIGCHLD and SIGCONT.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self.to_forward: deque[signal.Signals] = deque()
        """Signals to forward, to be taken one at a time, as the next one: a handler may append between two lines."""
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.asked_s: float | None = None
        """Time of the first request to stop (time.monotonic); None before."""
        self.received: list[signal.Signals] = []
        """Requests to stop, in order; a repetition of the same request is here once."""
        self._untaken: deque[StopAsked | Continued | float] = deque()
        self._stop_requests = SecondRequest()
        self.is_in_a_hurry = False
        """True if no process is to be waited for any more: SIGINT or SIGTERM was a second request."""

    def blocking(self, function: Callable[[], T]) -> T:
        """Run a function that may wait for other nodes, while the event loop goes on.

        Raises:
            SignalException: the launcher was asked to stop.
        """
        return self._reactor.call_blocking(function, self.check)

    def check(self) -> None:
        """Interrupt the caller if the launcher was asked to stop.

        Raises:
            SignalException: it was.
        """
        if self.received:
            raise SignalException(f"received {self.received[0].name}", sigval=self.received[0])

    def fileno(self) -> int:
        return self._read.fileno()

    def install(
        self,
        numbers: Sequence[signal.Signals] = (),
        *,
        forwarded: Sequence[signal.Signals] = (),
        keep_ignored_hangup: bool = True,
    ) -> None:
        """Take the handlers: ``numbers`` ask the launcher to stop.

        Python allows that in the main thread only. A launcher in another thread takes none, as torchrun does: signals
        stay with the program that called ``main``.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            # nohup ignores SIGHUP, and a job started so must outlive its terminal
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not (ignored and keep_ignored_hangup):
                signal.signal(number, lambda number, _frame: self.note(signal.Signals(number), time.monotonic()))
        for number in forwarded:
            signal.signal(number, lambda number, _frame: self.to_forward.append(signal.Signals(number)))
        # the wake-up needs a handler: a child that stopped or ended is then handled at once
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        if signal.SIGCONT not in (*numbers, *forwarded):
            signal.signal(signal.SIGCONT, lambda _number, _frame: self._untaken.append(Continued()))

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def take(self) -> list[StopAsked | Continued | float]:
        """Return what has come since the last call, in order, but first that the node was continued: its pause counts
        for no rank. A number: an early SIGINT is no second request; after these seconds it will be one."""
        taken = [self._untaken.popleft() for _ in range(len(self._untaken))]
        return sorted(taken, key=lambda each: not isinstance(each, Continued))

    def note(self, number: signal.Signals, now_s: float) -> None:
        """Note a request at ``now_s`` (time.monotonic)."""
        again = False
        if number in (signal.SIGINT, signal.SIGTERM):
            again = self._stop_requests.note(now_s) is Asked.AGAIN
            if not again and number in self.received:
                if number == signal.SIGINT:  # a person: Slurm sends SIGTERM twice
                    self._untaken.append(self._stop_requests.wait_s(now_s))
                return
        self.is_in_a_hurry = self.is_in_a_hurry or again
        self.asked_s = now_s if self.asked_s is None else self.asked_s
        self.received.append(number)
        self._untaken.append(StopAsked(number, again))

    def close(self) -> None:
        """Close the descriptors; further requests are ignored (the launcher is on its last steps)."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
        self._read.close()
        self._write.close()
