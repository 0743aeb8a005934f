"""How the ranks of a cycle end: which have time to do so by themselves, and what is done when that is over. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.edge import Say, SignalRanks, TerminateRanks, Way
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Options, Turn
from megatron_ft.core.job.restart_policy import Outcome

_MONITOR_ENDS_S = 6.0
"""A monitor that may end its rank signals it at once, and kills it after a grace of 5 s."""


class RankShutdown:
    """The end of one cycle's ranks on this node.

    Args:
        by_signals: the launcher was asked to stop, and that is why.
        restarts: another cycle is to follow.
        by_themselves: all ranks of the job are ending of their own accord.
    """

    def __init__(
        self,
        options: Options,
        record: CycleRecord,
        outcome: Outcome,
        *,
        by_signals: bool,
        restarts: bool,
        by_themselves: bool = False,
        turn: Turn,
    ) -> None:
        self._options = options
        self._record = record
        self._outcome = outcome
        self._is_asked = by_signals
        self._is_hurried = False
        self._restarts = restarts
        self._by_themselves = by_themselves
        self._awaited, patience_s = self._patience(turn)
        self.alarm_ns = turn.now_ns + round(patience_s * 1e9)
        """When ``is_over`` may hold by itself."""

    def _patience(self, turn: Turn) -> tuple[Set[int], float]:
        """Which ranks are waited for, and for how many seconds."""
        record, options = self._record, self._options
        request = record.shutdown_request or record.exclude_request
        if self._is_asked:
            return record.running, options.term_timeout_s
        if self._outcome is Outcome.FAILED and self._by_themselves and not record.hung:
            # one may still write down that the checkpoint is complete
            return record.running, options.stop_timeout_s
        if self._outcome is Outcome.FAILED:
            # found hung: they get the signal that the user chose for that, from their monitors, and no other
            dues = [grace.due_s - turn.now_s for grace in record.hung.values()]
            return set(record.hung), min([_MONITOR_ENDS_S, *dues])
        if self._outcome is Outcome.SUCCEEDED:
            # those left of a node where others failed: they are about to finish, like all the other nodes' ranks
            return record.running, options.stop_timeout_s
        if self._outcome is not Outcome.MEMBERSHIP and request is not None:
            # the rank that asked for the end has something to say on its way out: a traceback, a message
            asking = {lr for lr, started in record.started.items() if started.pid == request.pid}
            return asking or record.running, options.stop_timeout_s
        return set(), 0.0

    def stop_asked(self, numbers: Sequence[signal.Signals], hurry: signal.Signals | None, turn: Turn) -> None:
        """The launcher was asked to stop: pass that on, if that is how the ranks end.

        A Python rank gets the signal itself and alone: its data-loader workers would die of it and take the
        last checkpoint with them. Some other command may be a wrapper that passes nothing on, so its whole
        group gets it. ``hurry``: the signal that has asked a second time: no rank is waited for any more.
        """
        was_hurried, self._is_hurried = self._is_hurried, hurry is not None
        if self._outcome is Outcome.FAILED and numbers:
            self._is_hurried = True  # hung ranks have time to be ended by their monitors, and no more
        if self._is_asked and hurry is None:
            running = sorted(self._record.running)
            turn.do(*(SignalRanks(running, number, not self._options.ranks_are_python) for number in numbers))
        elif self._is_asked and hurry is not None and not was_hurried:
            turn.do(Say(lines.killing_at_once(hurry.name)))

    def is_over(self, now_ns: int) -> bool:
        """Whether no rank is to be waited for any more."""
        awaited = self._awaited & self._record.running
        if self._outcome is Outcome.FAILED:
            awaited = {local_rank for local_rank in awaited if not self._record.is_killed(local_rank)}
        return not awaited or self._is_hurried or now_ns >= self.alarm_ns

    def order(self, now_ns: int) -> TerminateRanks:
        """What to do once ``is_over`` holds."""
        options, is_quick = self._options, self._outcome is Outcome.FAILED and self._restarts
        grace_s = options.restart_grace_s if is_quick else options.stop_timeout_s
        if self._is_asked:
            # a wrapper itself may have died of the signal at once; what it started has the same time
            left_s = None if options.ranks_are_python else max(0.0, (self.alarm_ns - now_ns) / 1e9)
            return TerminateRanks(Way.KILLED, grace_s, left_s)
        way = Way.FINISHED if self._outcome is Outcome.SUCCEEDED else Way.TERMINATED
        return TerminateRanks(way, grace_s)
