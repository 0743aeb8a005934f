"""Why a cycle has ended, and what this launcher does next: from what it knows and the coordinator's verdict. Pure.

The coordinator's verdict is the same on all nodes. A node leaves the others by itself if its launcher was asked to
stop, if one of its ranks has asked for that, or if its ranks can't be killed.
"""

from __future__ import annotations

import dataclasses

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.coordinator_orders import CoordinatorOrders
from megatron_ft.core.agent.edge import Exit, Over, Readings
from megatron_ft.core.agent.leaving import Leaving
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.diagnosis.exits import Cause, CauseKind
from megatron_ft.core.job.edge import Leave
from megatron_ft.core.job.messages import Report, Verdict
from megatron_ft.core.job.restart_policy import Action, NodeState, Outcome, RestartDecision

__all__ = ["Known", "asked_at_last", "conclude", "finish", "report"]


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known at the end of a cycle.

    Args:
        verdict: the coordinator's; None where this node has left, or the others have lost it.
        leaving: whether the launcher was asked to stop, or has to.
    """

    record: CycleRecord
    orders: CoordinatorOrders
    verdict: Verdict | None
    leaving: Leaving
    restarts_left: int

    @property
    def is_own_end(self) -> bool:
        """Whether the cycle has ended for this node alone, as far as it knows: no other one says why."""
        return self.verdict is None or self.leaving.is_due or self.leaving.goodbye is not None

    @property
    def judged_again(self) -> Verdict | None:
        """The verdict that another coordinator, which didn't know of this one, has reached since: the job goes on."""
        verdict = self.orders.verdict
        is_new = verdict is not None and verdict != self.verdict and verdict.action is Action.RESTART
        return verdict if is_new else None


def report(record: CycleRecord, cycle: int, state: NodeState, cause: Cause | None, seen: Readings) -> Report:
    """The report on this node; ``cycle`` is the coordinator's number. Without a cause, that of the node's ranks."""
    if state is NodeState.SUCCEEDED:
        return Report(cycle, state)
    why = cause or record.own_failure(seen) or record.cause()
    return Report(
        cycle, state, why.line, kind=why.kind, rank=why.rank, follows=why.follows, reached=record.reached(seen, why)
    )


def conclude(known: Known, outcome: Outcome) -> tuple[RestartDecision, Cause]:
    """What follows from a cycle that hasn't ended well, and why it ended."""
    record, verdict = known.record, known.verdict
    stops = RestartDecision(action=Action.GIVE_UP, restarts_left=known.restarts_left, reason="not restarting")
    if verdict is None and known.leaving.signals:
        text = lines.stopped(known.leaving.signals[0].name, record.failures())
        return stops, Cause(kind=CauseKind.REQUEST, text=text)
    if verdict is None and known.leaving.abandoned:
        return stops, Cause(kind=CauseKind.MEMBERSHIP, text=known.leaving.abandoned)
    if verdict is None and known.orders.left is not None:
        cause = Cause(
            kind=CauseKind.MEMBERSHIP, text=known.orders.lost or known.orders.left.text or "the job has ended"
        )
        return dataclasses.replace(stops, reason=""), cause
    if verdict is None:
        text, follows = lines.taken_for_lost(known.orders.lost)
        if known.orders.is_cut_off:
            text, follows = known.orders.lost, "reconnecting to the job"
        again = RestartDecision(action=Action.RESTART, restarts_left=known.restarts_left, reason=follows)
        return again, Cause(kind=CauseKind.MEMBERSHIP, text=text)
    if outcome is Outcome.STOPPED and record.shutdown_request is not None:
        return stops, record.request_cause()
    decision = verdict.decision()
    if decision.action is Action.RESTART and known.leaving.is_due:
        decision = dataclasses.replace(decision, action=Action.GIVE_UP, reason="not restarting")
    return decision, _cause(known, verdict)


def asked_at_last(record: CycleRecord, outcome: Outcome) -> Outcome:
    """The outcome, with requests of ranks that came in the last moment."""
    if outcome in (Outcome.FAILED, Outcome.MEMBERSHIP):
        if record.shutdown_request is not None:
            return Outcome.STOPPED
        if record.exclude_request is not None:
            return Outcome.EXCLUDED
    return outcome


def _has_ended_the_job(known: Known, *, is_min_healthy: bool) -> bool:
    """Whether a job that gives up does so because of ranks of this node; with min-healthy that takes several nodes."""
    verdict, told = known.verdict, known.orders.told
    if verdict is None or verdict.outcome is Outcome.STOPPED:
        return False
    if is_min_healthy:
        return told is not None and told.state is NodeState.UNHEALTHY
    return verdict.rank in known.record.ranks or verdict.node == known.orders.place


def finish(known: Known, cause: Cause, left: Leave, *, is_min_healthy: bool) -> Over:
    """How a job ends here whose last cycle has failed."""
    verdict = known.verdict
    if verdict is None:
        return Over(Exit.LEFT, left.code, "" if left.text == cause.text else left.text)
    is_ours = known.record.failed and _has_ended_the_job(known, is_min_healthy=is_min_healthy)
    return Over(Exit.FAILED, left.code or 1, verdict=verdict, cause=cause if is_ours else None)


def _cause(known: Known, verdict: Verdict) -> Cause:
    """By the verdict; this node knows more of what it has told itself."""
    record, told = known.record, known.orders.told
    if verdict.node == known.orders.place and told is not None and verdict.text == told.text:
        if record.failed or record.found is not None:
            return dataclasses.replace(record.cause(), host=verdict.name)
        if record.exclude_request is not None:
            return dataclasses.replace(record.request_cause(), host=verdict.name)
    return verdict.cause(known.orders.place)
