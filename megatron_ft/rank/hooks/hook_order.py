"""Hooks of a train loop that are called out of order: one warning each, as such a loop is not watched as intended."""

from __future__ import annotations

import os

from megatron_ft.rank.base import agreement, say
from megatron_ft.rank.base.connection import MONITOR_SOCKET


class HookOrder:
    """Order of the hooks in this process, whichever state object they are given."""

    def __init__(self) -> None:
        self._stage = "new"
        """Then "off" (nothing is watched, as was said or asked for), "on", "over"."""
        self._in_step = False
        self._had_group = False

    def setup(self, *, is_on: bool) -> None:
        if is_on and self._stage == "on":
            say.warn("setup() was called again without shutdown(): the monitoring begins anew")
        self._stage, self._in_step, self._had_group = "on" if is_on else "off", False, agreement.has_process_group()

    def first_step(self) -> None:
        if not self._had_group and agreement.has_process_group():
            say.warn("setup() was called before init_process_group(): call it after that")

    def step_begins(self) -> None:
        if self._in_step:
            say.warn("on_training_step_start() was called again without on_training_step_end()")
        self._in_step = True

    def step_ends(self) -> bool:
        """Return True if a step had begun."""
        if not self._in_step:
            say.warn("on_training_step_end() was called without on_training_step_start(): steps are timed wrongly")
        was_in_step, self._in_step = self._in_step, False
        return was_in_step

    def without_client(self) -> None:
        """Warn of a hook before ``setup``, in a rank of ``ft_launcher``."""
        if self._stage == "new" and MONITOR_SOCKET in os.environ:
            say.warn("hooks are called before setup(): they do nothing, and no hang is detected")

    def shutdown(self, *, was_on: bool) -> None:
        if was_on:
            self._stage = "over"
        elif self._stage == "over":
            say.warn("shutdown() was called again: it does nothing")
        else:
            self.without_client()

    def abort(self) -> None:
        self._stage = "off"


order = HookOrder()
