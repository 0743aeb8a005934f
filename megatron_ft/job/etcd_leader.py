"""A leader's lock and decisions in etcd: asked for by the leader's loop, done in a thread of their own."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from megatron_ft.core.errors import ConfigError
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.etcd_keys import RENEW_S, EtcdAway, Ledger

_AGAIN_S = 0.3


class LockLost(Exception):
    """Raised when another launcher leads, or may."""


def enter(ledger: Ledger, *, is_needed: Callable[[], bool]) -> bool:
    """Read what earlier leaders have decided; return False if the lock is lost, or the leader not needed any more."""
    while is_needed():
        try:
            return ledger.enter()
        except (EtcdAway, ConfigError):
            time.sleep(_AGAIN_S)
    return False


class LeaderInEtcd:
    """One leader's. ``fileno`` is readable when something has been done: call ``take`` then.

    The leader's loop asks for each renewal: a leader that hangs or is paused loses the lock.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.problem = ""
        """Why etcd doesn't answer; empty if it does."""
        self.away_since_s = 0.0
        self._ledger = ledger
        self._work: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._done: deque[bool] = deque()
        """For each piece of work whether it was a change."""
        self._is_lost = False
        self._renews_s: float | None = 0.0
        """When to renew the lease next; None: it is being renewed."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="etcd", daemon=True).start()

    def fileno(self) -> int:
        return self._fd

    @property
    def due_s(self) -> float:
        """When to call ``renew`` next (time.monotonic)."""
        return float("inf") if self._renews_s is None else self._renews_s

    def renew(self, now_s: float) -> None:
        if now_s >= self.due_s:
            self._renews_s = None
            self._work.put(self._renew)

    def keep(self, record: DecisionRecord) -> None:
        """Make a decision durable: `take` says when it is."""
        self._work.put(lambda: self._change(lambda: self._ledger.keep(record)))

    def begin_life(self) -> None:
        self._work.put(lambda: self._change(self._ledger.begin_life))

    def take(self) -> int:
        """Return how many changes have been made since the last call.

        Raises:
            LockLost: this leader is to end at once.
        """
        os.eventfd_read(self._fd)
        changes = 0
        while self._done:
            if self._done.popleft():
                changes += 1
            else:
                self._renews_s = time.monotonic() + RENEW_S
        if self._is_lost:
            raise LockLost
        return changes

    def _run(self) -> None:
        while not self._is_lost:
            self._done.append(self._work.get()())
            os.eventfd_write(self._fd, 1)

    def _renew(self) -> bool:
        self._try(self._ledger.renew)
        return False

    def _change(self, change: Callable[[], bool]) -> bool:
        while not self._try(change):
            os.eventfd_write(self._fd, 1)  # the leader is to know that etcd is away
            time.sleep(_AGAIN_S)
        return True

    def _try(self, ask: Callable[[], bool]) -> bool:
        """Return True if etcd has answered."""
        try:
            self._is_lost = not ask() or self._is_lost
        except (EtcdAway, ConfigError) as error:  # a password that was changed may be changed back
            self.away_since_s = self.away_since_s if self.problem else time.monotonic()
            self.problem = str(error)
            return False
        self.problem = ""
        return True
