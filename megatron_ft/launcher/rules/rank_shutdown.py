"""End of a cycle's ranks: which get time to end by themselves, and what follows. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set

from megatron_ft.job.rules.messages import End
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.launcher.rules.effects import SignalRanks, TerminateRanks, TerminationMode
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.link.base.escalation import GRACE_S

_MONITOR_ENDS_S = GRACE_S + 1.0
"""Time for a monitor to end its rank: a signal at once, SIGKILL after the grace."""


class RankShutdown:
    """End of one cycle's ranks on this node.

    Args:
        by_signals: the cycle ends because the launcher was asked to stop.
        end: what the leader has said of the cycle's end; None if nothing yet.
    """

    def __init__(
        self, options: Options, cycle: NodeCycle, outcome: Outcome, end: End | None, turn: Turn, *, by_signals: bool
    ) -> None:
        self._options = options
        self._cycle = cycle
        self._outcome = outcome
        self._end = end
        self._by_signals = by_signals
        self._is_hurried = False
        self._awaited, patience_s = self._patience(turn)
        self.alarm_ns = turn.now_ns + round(patience_s * 1e9)
        """Time at which ``is_over`` is True in any case."""

    def _patience(self, turn: Turn) -> tuple[Set[int], float]:
        """Return the ranks to wait for, and the seconds."""
        cycle, options = self._cycle, self._options
        request = cycle.shutdown_request or cycle.exclude_request
        if self._by_signals:
            return cycle.running, options.term_timeout_s
        if self._outcome is Outcome.FAILED and not (self._end and self._end.by_themselves and not cycle.hung):
            # hung ranks get only the signal that the user chose for hangs, from their monitors
            dues = [grace.due_s - turn.now_s for grace in cycle.hung.values()]
            return set(cycle.hung), min([_MONITOR_ENDS_S, *dues])
        if self._outcome in (Outcome.FAILED, Outcome.SUCCEEDED):
            # all are ending of their own accord, and one may still write down that the checkpoint is complete; or ranks
            # left where others failed are about to finish, like those of other nodes
            return cycle.running, options.stop_timeout_s
        if self._outcome is not Outcome.MEMBERSHIP and request is not None:
            # the requesting rank may have output on its way out: a traceback, a message
            asking = {lr for lr, started in cycle.started.items() if started.pid == request.pid}
            return asking or cycle.running, options.stop_timeout_s
        return set(), 0.0

    def stop_asked(self, numbers: Sequence[signal.Signals], hurry: signal.Signals | None, turn: Turn) -> None:
        """Pass a request to stop on to the ranks, if they end because of it.

        A Python rank alone gets the signal: its data-loader workers would die of it and take the last checkpoint with
        them. Another command may be a wrapper that passes no signals on, so its whole group gets it. ``hurry``: signal
        of the second request: no rank is waited for any more.
        """
        was_hurried, self._is_hurried = self._is_hurried, hurry is not None
        if self._outcome is Outcome.FAILED and numbers:
            self._is_hurried = True  # hung ranks get only the time for their monitors to end them
        if self._by_signals and hurry is None:
            running = sorted(self._cycle.running)
            turn.do(*(SignalRanks(running, number, not self._options.ranks_are_python) for number in numbers))
        elif self._by_signals and hurry is not None and not was_hurried:
            turn.say(f"received {hurry.name} again: killing the ranks")

    def is_over(self, now_ns: int) -> bool:
        """Return True if no rank is to be waited for any more."""
        awaited = self._awaited & self._cycle.running
        if self._outcome is Outcome.FAILED:
            awaited = {local_rank for local_rank in awaited if not self._cycle.is_killed(local_rank)}
        return not awaited or self._is_hurried or now_ns >= self.alarm_ns

    def order(self, now_ns: int) -> TerminateRanks:
        """Return the termination order, once ``is_over``."""
        options, restarts = self._options, self._end is not None and self._end.restarts
        is_quick = self._outcome is Outcome.FAILED and restarts
        grace_s = options.restart_grace_s if is_quick else options.stop_timeout_s
        if self._by_signals:
            # a wrapper may have died of the signal at once; its children have the same time
            left_s = None if options.ranks_are_python else max(0.0, (self.alarm_ns - now_ns) / 1e9)
            return TerminateRanks(TerminationMode.KILLED, grace_s, left_s)
        way = TerminationMode.FINISHED if self._outcome is Outcome.SUCCEEDED else TerminationMode.TERMINATED
        return TerminateRanks(way, grace_s)
