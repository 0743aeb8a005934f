"""A leader's lock and decisions in etcd: what follows from a decision waits until etcd has it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules.actions import BeginLife, CoordinatorEffect, Send
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import RENEW_S, EtcdAway, Ledger
from megatron_ft.job.rules.messages import Admitted, Beat, Dismiss
from megatron_ft.job.rules.restart_policy import Rules

AGAIN_S = 0.3
"""Seconds until etcd is asked again after it hasn't answered."""


class LeaderOver(Exception):
    """Raised when this leader is to end at once: another launcher leads, or may; or no decision can be kept.

    Args:
        dismissal: what all launchers are told; None if another leader tells them.
    """

    def __init__(self, dismissal: Dismiss | None = None) -> None:
        super().__init__()
        self.dismissal = dismissal


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
        submit: has work done in a thread, after some seconds, and then calls ``answered``.
    """

    def __init__(
        self,
        ledger: Ledger,
        rules: Rules,
        *,
        submit: Callable[[Work, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        """Why etcd doesn't answer; empty if it does."""
        self._refused_s: float | None = None
        """Since when the change that waits can't be made; leases may be renewed meanwhile."""
        self._ledger, self._rules, self._submit, self._clock = ledger, rules, submit, clock
        self._waiting: deque[CoordinatorEffect] = deque()
        """A change is being made, the first of these; what follows from it waits. Empty: none is."""
        self.due_s = 0.0
        """When to call ``renew`` next, by the clock; infinite while the lease is being renewed."""

    def renew(self, now_s: float) -> None:
        if now_s >= self.due_s:
            self.due_s = float("inf")
            self._submit(Work(self._ledger.renew, is_change=False), 0.0)

    def admit(self, effects: Iterable[CoordinatorEffect]) -> list[CoordinatorEffect]:
        """Return what to do now; `answered` returns the rest. An admission and a beat tell nothing of a decision."""
        now: list[CoordinatorEffect] = []
        for effect in effects:
            if self._waiting and not (isinstance(effect, Send) and isinstance(effect.message, Admitted | Beat)):
                self._waiting.append(effect)
            elif isinstance(effect, DecisionRecord | BeginLife):
                self._waiting.append(effect)
                ask = self._ledger.begin_life
                if isinstance(effect, DecisionRecord):
                    ask = functools.partial(self._ledger.keep, effect)
                self._submit(Work(ask, is_change=True), 0.0)
            else:
                now.append(effect)
        return now

    def answered(self, work: Work, answer: Callable[[], bool]) -> list[CoordinatorEffect]:
        """Take etcd's answer; return the change that was made, if one was, and what follows from it.

        A change that isn't made is asked for again, for the time in which a round must be met.

        Raises:
            LeaderOver: this leader is to end at once.
        """
        now_s = self._clock()
        try:
            if not answer():
                raise LeaderOver
            self.problem = ""
        except (EtcdAway, ConfigError) as error:  # a password that was changed may be changed back
            self.problem = str(error)
            if work.is_change:
                self._refused_s = now_s if self._refused_s is None else self._refused_s
                if now_s >= self._refused_s + self._rules.join_timeout_s:
                    raise LeaderOver(self._dismissal) from None
                self._submit(work, AGAIN_S)
                return []
        if not work.is_change:
            self.due_s = now_s + RENEW_S
            return []
        self._refused_s, made = None, self._waiting.popleft()
        following, self._waiting = self._waiting, deque()
        return [made, *self.admit(following)]

    @property
    def _dismissal(self) -> Dismiss:
        change, code = self._waiting[0], TRY_AGAIN_CODE
        if isinstance(change, DecisionRecord) and change.decision.kind is DecisionKind.END:
            code = change.decision.code
        return Dismiss(code, f"no decision could be kept for {self._rules.join_timeout_s:g} s: {self.problem}")
