"""A leader's decision is made durable before anything follows from it: at once, or by etcd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules.actions import CoordinatorEffect, Quit, Send
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import RENEW_S, EtcdAway, Ledger
from megatron_ft.job.rules.messages import Admitted, Beat, Dismiss
from megatron_ft.job.rules.restart_policy import Rules

AGAIN_S = 0.3
"""Seconds until etcd is asked again after it hasn't answered."""


def enter(ledger: Ledger) -> DecisionRecord | None:
    """Return the last decision of an earlier leader, as soon as etcd tells."""
    while True:
        try:
            return ledger.enter()
        except (EtcdAway, ConfigError):
            time.sleep(AGAIN_S)


class Decisions:
    """One leader's. Its loop asks for each request to etcd: a leader that hangs or is paused loses the lock.

    Call `request` when ``due_s`` is over, have a thread do what it returns, and give the result to `answered`.

    Args:
        ledger: None if the lock is the endpoint's port: the launcher that holds it has each decision at once.
        links: numbers of all connections.
    """

    def __init__(self, ledger: Ledger | None, rules: Rules, links: Collection[int]) -> None:
        self.problem = ""
        """Why etcd doesn't do what it is asked for; empty if it does."""
        self.due_s = math.inf if ledger is None else 0.0
        """When to ask etcd next; infinite while it is being asked."""
        self._ledger, self._rules, self._links = ledger, rules, links
        self._made: DecisionRecord | None = None
        """The decision that is being made, since when, and whether etcd is being asked for it; what follows waits."""
        self._since_s, self._is_asked = 0.0, False
        self._following: list[CoordinatorEffect] = []

    def admit(self, effects: list[CoordinatorEffect], now_s: float) -> list[CoordinatorEffect]:
        """Return what to do now; `answered` returns the rest. An admission and a beat tell nothing of a decision."""
        if self._ledger is None:
            return effects
        now: list[CoordinatorEffect] = []
        for effect in effects:
            waits = self._made is not None
            if waits and not (isinstance(effect, Send) and isinstance(effect.message, Admitted | Beat)):
                self._following.append(effect)
            elif isinstance(effect, DecisionRecord):
                self._made, self._since_s = effect, now_s
                self.due_s = self.due_s if math.isinf(self.due_s) else 0.0
            else:
                now.append(effect)
        return now

    def request(self) -> Callable[[], bool]:
        """Return what to do in a thread: renew the leases, and then make the decision, if one waits."""
        self.due_s = math.inf
        assert self._ledger is not None
        ledger, record = self._ledger, self._made
        self._is_asked = record is not None
        return lambda: ledger.renew() and (record is None or ledger.keep(record))

    def answered(self, answer: Callable[[], bool], now_s: float) -> list[CoordinatorEffect]:
        """Take etcd's answer; return the decision that was made, if one was, and what follows from it.

        Without the lock this leader ends at once. A decision is asked for again, for the time in which a round must be
        met; then all launchers are dismissed.
        """
        record = self._made
        try:
            if not answer():
                return [Quit()]
        except (EtcdAway, ConfigError) as error:  # a password that was changed may be changed back
            self.problem, self.due_s = str(error), now_s + AGAIN_S
            timeout_s = self._rules.join_timeout_s
            if record is None or now_s < self._since_s + timeout_s:
                return []
            code = record.decision.code if record.decision.kind is DecisionKind.END else TRY_AGAIN_CODE
            text = f"no decision could be kept for {timeout_s:g} s: {self.problem}"
            return [Send(list(self._links), Dismiss(code, text)), Quit()]
        self.problem, made = "", list[CoordinatorEffect]()
        if record is not None and self._is_asked:
            following, self._made, self._following = self._following, None, []
            made = [record, *self.admit(following, now_s)]
        self.due_s = now_s + RENEW_S if self._made is None else 0.0
        return made
