"""Why this launcher leaves the job before its end, and how the ranks of a cycle end. Pure.

A node leaves the others by itself if its launcher was asked to stop, if one of its ranks has asked for that, or if its
ranks can't be killed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from megatron_ft.config.launcher_options import RESTART_GRACE_S
from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules.messages import Goodbye
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.launcher.rules import cycle_lines, events
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.launcher.rules.events import Exit, LauncherExit, TerminateRanks, TerminationMode
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.link.base.escalation import GRACE_S
from megatron_ft.link.facts.launcher import Cause

_MONITOR_ENDS_S = GRACE_S + 1.0
"""Time for a monitor to end its rank: a signal at once, SIGKILL after the grace."""


@dataclass
class LeaveReason:
    """Reason why this launcher leaves the job before its end, its message to the others, and its own end."""

    signals: list[signal.Signals] = field(default_factory=list)
    """Signals that have asked the launcher to stop."""
    hurry: signal.Signals | None = None
    """Signal of the second request."""
    abandoned: str = ""
    """Why the launcher can't go on where it is, in words; empty if it can."""
    goodbye: Goodbye | None = None
    cause: Cause | None = None
    """Why this node is left out."""
    stuck: str = ""
    """Processes for which it is left out, in words; empty if a rank asked for it."""

    def asked(self, event: events.StopAsked) -> None:
        """Note a signal that asks the launcher to stop."""
        self.signals.append(event.number)
        self.hurry = self.hurry or (event.number if event.again else None)

    @property
    def is_due(self) -> bool:
        """True if the launcher leaves of its own accord."""
        return bool(self.signals or self.abandoned)

    def leave_out(self, cause: Cause, stuck: str) -> Goodbye:
        """Leave because a rank asked for it, or because processes (``stuck``, in words) can't be killed. Return the
        goodbye."""
        self.cause, self.stuck = cause, stuck
        self.goodbye = Goodbye(f"{stuck} can't be killed" if stuck else cause.text, excluded=True, code=0)
        return self.goodbye

    def end(self) -> LauncherExit:
        """Return the end of a launcher that leaves of its own accord."""
        if self.signals:
            return stopped(self.signals[0], self.goodbye is not None and self.goodbye.code == 0)
        return LauncherExit(Exit.ABANDONED, TRY_AGAIN_CODE, self.abandoned)


def stopped(number: int, well: bool) -> LauncherExit:
    """Return the end of a launcher that was asked to stop; ``well``: all its ranks have ended with 0."""
    text = cycle_lines.stopped(signal.Signals(number).name, [] if well else ["not all ranks exited with 0"])
    return LauncherExit(Exit.STOPPED, 128 + number if number == signal.SIGINT else 0 if well else 1, text)


class RankShutdown:
    """End of one cycle's ranks on this node: which get time to end by themselves, and what follows.

    If they end because the launcher was asked to stop, they get the signals. A Python rank alone gets each: its
    data-loader workers would die of it and take the last checkpoint with them. Another command may be a wrapper that
    passes no signals on, so its whole group gets it. After a second request no rank is waited for any more.
    """

    def __init__(
        self,
        options: Options,
        cycle: NodeCycle,
        outcome: Outcome,
        orders: CoordinatorView,
        leaving: LeaveReason,
        turn: Turn,
    ) -> None:
        self._options, self._cycle, self._outcome = options, cycle, outcome
        self._end, self._leaving = orders.end, leaving
        self._by_signals = bool(leaving.signals)
        self._was_hurried = False
        self._awaited, patience_s = self._patience(turn)
        self.alarm_ns = turn.now_ns + round(patience_s * 1e9)
        """Time at which ``is_over`` is True in any case."""
        self.stop_asked(leaving.signals, turn)

    def _patience(self, turn: Turn) -> tuple[Set[int], float]:
        """Return the ranks to wait for, and the seconds."""
        cycle, options = self._cycle, self._options
        request = cycle.shutdown_request or cycle.exclude_request
        if self._by_signals:
            return cycle.running, options.given.term_timeout
        if self._outcome is Outcome.FAILED and not (self._end and self._end.by_themselves and not cycle.hung):
            # hung ranks get only the signal that the user chose for hangs, from their monitors
            dues = [grace.due_s - turn.now_s for grace in cycle.hung.values()]
            return set(cycle.hung), min([_MONITOR_ENDS_S, *dues])
        if self._outcome in (Outcome.FAILED, Outcome.SUCCEEDED):
            # all are ending of their own accord, and one may still write down that the checkpoint is complete; or ranks
            # left where others failed are about to finish, like those of other nodes
            return cycle.running, options.given.workers_stop_timeout
        if self._outcome is not Outcome.MEMBERSHIP and request is not None:
            # the requesting rank may have output on its way out: a traceback, a message
            asking = {lr for lr, started in cycle.started.items() if started.pid == request.pid}
            return asking or cycle.running, options.given.workers_stop_timeout
        return set(), 0.0

    def stop_asked(self, numbers: Sequence[signal.Signals], turn: Turn) -> None:
        """Pass a request to stop on to the ranks, if they end because of it."""
        hurry = self._leaving.hurry
        if self._by_signals and hurry is None:
            running = sorted(self._cycle.running)
            turn.do(*(events.SignalRanks(running, number, not self._options.ranks_are_python) for number in numbers))
        elif self._by_signals and hurry is not None and not self._was_hurried:
            turn.say(f"received {hurry.name} again: killing the ranks")
        self._was_hurried = hurry is not None

    def is_over(self, now_ns: int) -> bool:
        """Return True if no rank is to be waited for any more."""
        awaited, is_hurried = self._awaited & self._cycle.running, self._was_hurried
        if self._outcome is Outcome.FAILED:
            awaited = {local_rank for local_rank in awaited if signal.SIGKILL not in self._cycle.signalled[local_rank]}
            is_hurried = bool(self._leaving.signals)  # hung ranks get only the time for their monitors to end them
        return not awaited or is_hurried or now_ns >= self.alarm_ns

    def order(self, now_ns: int) -> TerminateRanks:
        """Return the termination order, once ``is_over``."""
        options = self._options
        is_quick = self._outcome is Outcome.FAILED and self._end is not None and self._end.restarts
        # without the failed rank nothing can be saved together any more, and each second is one of the job's
        is_quick = is_quick and not options.given.is_set("workers_stop_timeout")
        grace_s = RESTART_GRACE_S if is_quick else options.given.workers_stop_timeout
        if self._by_signals:
            # a wrapper may have died of the signal at once; its children have the same time
            left_s = None if options.ranks_are_python else max(0.0, (self.alarm_ns - now_ns) / 1e9)
            return TerminateRanks(TerminationMode.KILLED, grace_s, left_s)
        way = TerminationMode.FINISHED if self._outcome is Outcome.SUCCEEDED else TerminationMode.TERMINATED
        return TerminateRanks(way, grace_s)
