"""A leader's lock and decisions in etcd: what follows from a decision waits until etcd has it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.actions import BeginLife, CoordinatorEffect, Send
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import RENEW_S, EtcdAway, Ledger
from megatron_ft.job.rules.messages import Admitted, Beat, Dismiss
from megatron_ft.job.rules.restart_policy import Rules

AGAIN_S = 0.3
"""Seconds until etcd is asked again after it hasn't answered."""


class LockLost(Exception):
    """Raised when another launcher leads, or may."""


class Work(NamedTuple):
    """A request to etcd. ``ask`` returns False if the lock is lost; a change is asked for until etcd answers."""

    ask: Callable[[], bool]
    is_change: bool


def enter(ledger: Ledger, *, is_needed: Callable[[], bool]) -> bool:
    """Read what earlier leaders have decided; return False if the lock is lost, or the leader not needed any more."""
    while is_needed():
        try:
            return ledger.enter()
        except (EtcdAway, ConfigError):
            time.sleep(AGAIN_S)
    return False


class LeaderInEtcd:
    """One leader's. Its loop asks for each renewal: a leader that hangs or is paused loses the lock.

    Args:
        submit: has work ``tried`` elsewhere, and then calls ``take``.
    """

    def __init__(
        self, ledger: Ledger, *, submit: Callable[[Work], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problem = ""
        """Why etcd doesn't answer; empty if it does."""
        self._refused: tuple[float, str] | None = None
        """Since when the change that waits can't be made, and why; leases may be renewed meanwhile. None: it may be."""
        self._ledger, self._submit, self._clock = ledger, submit, clock
        self._waiting: deque[CoordinatorEffect] = deque()
        """A change is being made, the first of these; what follows from it waits. Empty: none is."""
        self._done: deque[bool] = deque()
        """For each piece of work whether it was a change."""
        self._is_lost = False
        self.due_s = 0.0
        """When to call ``renew`` next, by the clock; infinite while the lease is being renewed."""

    def renew(self, now_s: float) -> None:
        if now_s >= self.due_s:
            self.due_s = float("inf")
            self._submit(Work(self._ledger.renew, is_change=False))

    def admit(self, effects: Iterable[CoordinatorEffect]) -> list[CoordinatorEffect]:
        """Return what to do now; `take` returns the rest later. An admission and a beat tell nothing of a decision."""
        now: list[CoordinatorEffect] = []
        for effect in effects:
            if self._waiting and not (isinstance(effect, Send) and isinstance(effect.message, Admitted | Beat)):
                self._waiting.append(effect)
            elif isinstance(effect, DecisionRecord | BeginLife):
                self._waiting.append(effect)
                ask = self._ledger.begin_life
                if isinstance(effect, DecisionRecord):
                    ask = functools.partial(self._ledger.keep, effect)
                self._submit(Work(ask, is_change=True))
            else:
                now.append(effect)
        return now

    def take(self) -> list[CoordinatorEffect]:
        """Return the change that was made since the last call, if one was, and what follows from it.

        Raises:
            LockLost: this leader is to end at once.
        """
        if self._is_lost:
            raise LockLost
        made: list[CoordinatorEffect] = []
        while self._done:
            if self._done.popleft():
                made.append(self._waiting.popleft())
                following, self._waiting = self._waiting, deque()
                made += self.admit(following)
            else:
                self.due_s = self._clock() + RENEW_S
        return made

    def gives_up(self, rules: Rules, now_s: float) -> Dismiss | None:
        """Return the end of all launchers, if no change could be made for the time in which a round must be met."""
        refused = self._refused  # a thread may change it
        if refused is None or now_s - refused[0] < rules.join_timeout_s:
            return None
        decision = self._waiting[0].decision if isinstance(self._waiting[0], DecisionRecord) else None
        code = decision.code if decision is not None and decision.kind is DecisionKind.END else rules.try_again_code
        return Dismiss(code, f"no decision could be kept for {rules.join_timeout_s:g} s: {refused[1]}")

    def tried(self, work: Work) -> bool:
        """Ask etcd; return False if a change isn't made, and is to be asked for again."""
        try:
            self._is_lost = not work.ask() or self._is_lost
            self.problem = ""
        except (EtcdAway, ConfigError) as error:  # a password that was changed may be changed back
            self.problem = str(error)
            if work.is_change:
                since_s, _ = self._refused or (self._clock(), "")
                self._refused = since_s, self.problem
                return False
        if work.is_change:  # a renewal, in another thread, leaves it alone
            self._refused = None
        self._done.append(work.is_change)
        return True
