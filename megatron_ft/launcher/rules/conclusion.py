"""The end of a cycle: its cause, this launcher's next act, and the end of its part in the job. Pure.

The coordinator's verdict is the same on all nodes. A node leaves the others by itself if its launcher was asked to
stop, if one of its ranks has asked for that, or if its ranks can't be killed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules.actions import Leave
from megatron_ft.job.rules.messages import Goodbye, Report, Verdict
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome, RestartDecision
from megatron_ft.launcher.rules import cycle_lines
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.launcher.rules.effects import Exit, LauncherExit
from megatron_ft.launcher.rules.events import Readings, StopAsked
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.link.facts.launcher import Abandoned, Cause, CauseKind


class LeaveReason:
    """Reason why this launcher leaves the job before its end, its message to the others, and its own end."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        """Signals that have asked the launcher to stop."""
        self.hurry: signal.Signals | None = None
        """Signal of the second request."""
        self.abandoned = ""
        """Why the launcher can't go on where it is, in words; empty if it can."""
        self.goodbye: Goodbye | None = None
        self.cause: Cause | None = None
        """Why this node is left out."""
        self.stuck = ""
        """Processes for which it is left out, in words; empty if a rank asked for it."""

    def asked(self, event: StopAsked | Abandoned) -> None:
        """Note a signal that asks the launcher to stop, or why it can't go on where it is."""
        if isinstance(event, Abandoned):
            self.abandoned = event.text
            return
        self.signals.append(event.number)
        if event.again:
            self.hurry = self.hurry or event.number

    @property
    def is_due(self) -> bool:
        """True if the launcher leaves of its own accord."""
        return bool(self.signals or self.abandoned)

    @property
    def is_excluded(self) -> bool:
        """True if the others were told that this node is left out."""
        return self.goodbye is not None and self.goodbye.excluded

    def take_leave(self, *, well: bool) -> Goodbye:
        """Leave, and return the goodbye. ``well``: every rank of this node that has ended did so with 0."""
        if self.signals:
            self.goodbye = Goodbye(f"its launcher received {self.signals[0].name}", well=well)
        else:
            self.goodbye = Goodbye(self.abandoned, failed=True)
        return self.goodbye

    def leave_out(self, cause: Cause, stuck: str) -> Goodbye:
        """Leave because a rank asked for it, or because processes (``stuck``, in words) can't be killed. Return the
        goodbye."""
        self.cause, self.stuck = cause, stuck
        self.goodbye = Goodbye(f"{stuck} can't be killed" if stuck else cause.text, excluded=True)
        return self.goodbye

    def over(self) -> LauncherExit:
        """Return the end of a launcher that leaves of its own accord."""
        assert self.goodbye is not None
        if self.signals:
            return stopped(self.signals[0], self.goodbye.well)
        return LauncherExit(Exit.ABANDONED, TRY_AGAIN_CODE, self.abandoned)


def stopped(number: int, well: bool) -> LauncherExit:
    """Return the end of a launcher that was asked to stop; ``well``: all its ranks have ended with 0."""
    text = cycle_lines.stopped(signal.Signals(number).name, [] if well else ["not all ranks exited with 0"])
    return LauncherExit(Exit.STOPPED, 128 + number if number == signal.SIGINT else 0 if well else 1, text)


def report(cycle: NodeCycle, state: NodeState, cause: Cause | None, seen: Readings) -> Report:
    """Return the report on this node. Without a ``cause``, its ranks tell it."""
    if state is NodeState.SUCCEEDED:
        return Report(cycle.cycle, state)
    why = cause or cycle.mixed or cycle.own_failure(seen) or cycle.cause()
    return Report(
        cycle.cycle,
        state,
        replace(why, text=why.line, iteration=None, detail=""),
        cycle.reached(seen, why),
        ranks=0 if why.rerun is None else len(cycle.ranks),
        is_mixed=cycle.mixed is not None,
    )


@dataclass(frozen=True)
class EndOfCycle:
    """Facts at the end of a cycle.

    Args:
        verdict: the coordinator's; None if this node has left, or the others have lost it.
        leaving: requests to stop, or the launcher's reason to leave.
    """

    cycle: NodeCycle
    orders: CoordinatorView
    verdict: Verdict | None
    leaving: LeaveReason
    restarts_left: int

    def conclude(self, outcome: Outcome) -> tuple[RestartDecision, Cause]:
        """Return the decision after a cycle that hasn't ended well, and its cause."""
        cycle, orders, leaving, verdict = self.cycle, self.orders, self.leaving, self.verdict
        stops = RestartDecision(action=Action.GIVE_UP, restarts_left=self.restarts_left, reason="not restarting")
        if verdict is not None:
            if outcome is Outcome.STOPPED and cycle.shutdown_request is not None:
                return stops, cycle.request_cause()
            decision = verdict.decision
            if decision.action is Action.RESTART and leaving.is_due:
                decision = replace(decision, action=Action.GIVE_UP, reason=stops.reason)
            return decision, self._cause(verdict)
        if leaving.signals:
            text = cycle_lines.stopped(leaving.signals[0].name, cycle.failures())
            return stops, Cause(kind=CauseKind.REQUEST, text=text)
        if leaving.abandoned:
            return stops, Cause(text=leaving.abandoned)
        if orders.left is not None:
            return replace(stops, reason=""), Cause(text=orders.lost or orders.left.text or "the job has ended")
        follows = "reconnecting to the job" if orders.is_cut_off else "on standby"
        again = RestartDecision(action=Action.RESTART, restarts_left=self.restarts_left, reason=follows)
        return again, Cause(text=orders.lost if orders.is_cut_off else cycle_lines.taken_for_lost(orders.lost))

    def _cause(self, verdict: Verdict) -> Cause:
        """Return the verdict's cause, in this node's own, more detailed words if it reported it."""
        cycle, told = self.cycle, self.orders.told
        if verdict.node == self.orders.place and told is not None and verdict.cause.text == told.cause.text:
            if cycle.failed or cycle.found is not None:
                return replace(cycle.cause(), host=verdict.cause.host)
            if cycle.exclude_request is not None:
                return replace(cycle.request_cause(), host=verdict.cause.host)
        return verdict.cause_for(self.orders.place)

    def finish(self, cause: Cause, left: Leave, *, is_min_healthy: bool) -> LauncherExit:
        """Return the end of a job whose last cycle has failed."""
        verdict, told = self.verdict, self.orders.told
        if verdict is None:
            return LauncherExit(Exit.LEFT, left.code, "" if left.text == cause.text else left.text)
        # ranks of this node may be why the job gives up; with min-healthy that takes several nodes
        is_ours = verdict.cause.rank in self.cycle.ranks or verdict.node == self.orders.place
        if is_min_healthy:
            is_ours = told is not None and told.state is NodeState.UNHEALTHY
        is_ours = is_ours and bool(self.cycle.failed) and verdict.outcome is not Outcome.STOPPED
        return LauncherExit(Exit.FAILED, left.code or 1, verdict=verdict, cause=cause if is_ours else None)
