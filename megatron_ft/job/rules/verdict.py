"""Why a cycle ended, in words, and what follows: from the reports of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megatron_ft.core.facts.launcher import Cause, CauseKind
from megatron_ft.core.rerun import WANTS_ANOTHER_GPU, Rerun
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.messages import Report, Verdict
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome
from megatron_ft.job.rules.rotation import Rotation, rotation_for

if TYPE_CHECKING:
    from megatron_ft.job.rules.job_cycle import JobCycle

GOOD = (NodeState.HEALTHY, NodeState.SUCCEEDED)
_FINAL = (NodeState.SUCCEEDED, NodeState.EXCLUDED)
"""States a node reaches by itself; the later end of its launcher changes nothing."""
_LIKELY = (NodeState.UNHEALTHY, NodeState.LOST, NodeState.EXCLUDED)
"""Which of several nodes ended a cycle: launchers may end with their ranks, and who is left out costs no restart."""


@dataclass(slots=True)
class Seat:
    """A place in a cycle, and how its node stands."""

    report: Report
    name: str = ""
    instance: str = ""
    missing_s: float | None = None
    """Since when no node is connected that has it."""
    leaving: str = ""
    """Its node has said farewell, and why; all its ranks had ended with 0."""

    @property
    def state(self) -> NodeState:
        return self.report.state

    @property
    def has_finished(self) -> bool:
        return self.state is NodeState.SUCCEEDED or bool(self.leaving)

    def occupy(self, instance: str, name: str) -> None:
        self.instance, self.name, self.missing_s = instance, name, None

    def miss(self, now_s: float) -> None:
        self.missing_s = now_s

    def leave(self, text: str) -> None:
        self.leaving = text

    def take_leaving(self) -> str:
        """Why its node has said farewell, once; empty if it hasn't."""
        text, self.leaving = self.leaving, ""
        return text

    def change(self, report: Report) -> bool:
        """Take a report; False if it says nothing new."""
        is_telling = (self.report.cause.follows and not report.cause.follows) or report.is_mixed > self.report.is_mixed
        if self.state in _FINAL or (report.state is self.state and not is_telling):
            return False
        self.report = report
        return True


def verdict_on(cycle: JobCycle, *, nodes_left: int, printer: str = "") -> Verdict:
    """Return the verdict on a cycle whose outcome is known. ``nodes_left``: that could take part in another one."""
    rules, seats, outcome = cycle.rules, cycle.seats, cycle.outcome
    assert outcome is not None
    rerun = _rerun_report(seats, cycle.decided_by) if outcome is Outcome.FAILED else None
    asks = None if rerun is None else rerun.cause.rerun
    excluded = any(seat.state is NodeState.EXCLUDED for seat in seats)
    decision = rules.policy.decide(
        outcome,
        restarts_before=cycle.decision.restarts,
        nodes_left=nodes_left if excluded else None,
        advance=cycle.advance,
        rerun=asks,
        restored=cycle.decision.restore is not None,
    )
    code = 0 if decision.action is Action.FINISH else rules.no_progress_code if decision.no_progress else 1
    found = None if cycle.found is None or outcome is not Outcome.FAILED else cycle.found.cause
    cause, node, names_nodes = _cause(cycle, found)
    rotation = _rotation(rerun, decision.action, nodes=len(seats))
    if asks in WANTS_ANOTHER_GPU:
        decision = replace(decision, change=job_lines.rotation(rotation))
    return Verdict(
        cycle=cycle.decision.cycle,
        outcome=outcome,
        cause=replace(cause, host=_host(seats, node, found), rerun=asks),
        decision=decision,
        node=node,
        nodes=len(seats),
        names_nodes=names_nodes,
        code=code,
        stopped=any(seat.leaving for seat in seats),
        rotation=rotation,
        reached=cycle.how_far,
        printer=printer,
    )


def _rerun_report(seats: Sequence[Seat], decided_by: int | None) -> Report | None:
    """The report of the node whose ranks Megatron's rerun state machine has ended, if that ended the cycle.

    All ranks of the job end by it with the same code.
    """
    place = first_failure(seats, decided_by)
    return None if place is None or seats[place].report.cause.rerun is None else seats[place].report


def _rotation(rerun: Report | None, action: Action, *, nodes: int) -> Rotation:
    if rerun is None or rerun.cause.rerun not in WANTS_ANOTHER_GPU or action is not Action.RESTART:
        return Rotation.NONE
    return rotation_for(nodes=nodes, ranks=rerun.ranks, again=rerun.cause.rerun is Rerun.AGAIN)


def _host(seats: Sequence[Seat], node: int | None, found: Cause | None) -> str:
    """Return the host of the node at fault. The node that reports a hang is often only waiting."""
    if found is not None and (found.rank is None or found.host):
        return found.host
    return "" if node is None else seats[node].name


def _cause(cycle: JobCycle, found: Cause | None) -> tuple[Cause, int | None, bool]:
    """Return why, the place of the node whose fault it was, and whether the words name the nodes they are about."""
    rules, seats, outcome, decided_by = cycle.rules, cycle.seats, cycle.outcome, cycle.decided_by
    if outcome is Outcome.STOPPED and cycle.shutdown is not None:
        return Cause(kind=CauseKind.REQUEST, text=cycle.shutdown[1]), cycle.shutdown[0], False
    if outcome is Outcome.SUCCEEDED:
        return Cause(kind=CauseKind.REQUEST, text=finished(seats)), None, True
    if found is not None:
        return found, decided_by, True
    if outcome is Outcome.MEMBERSHIP:
        left = [(place, seat) for place, seat in enumerate(seats) if seat.state is NodeState.EXCLUDED]
        told = job_lines.joined(job_lines.leaves(place, seat.name, seat.report.cause.text) for place, seat in left)
        text = told or job_lines.nodes_waiting(cycle.joining)
        return Cause(kind=CauseKind.MEMBERSHIP, text=text), left[0][0] if left else None, True
    good, place = sum(seat.state in GOOD for seat in seats), first_failure(seats, decided_by)
    is_mixed = decided_by is not None and seats[decided_by].report.is_mixed
    if rules.min_healthy and len(seats) > 1 and good < len(seats) and not is_mixed:
        text = job_lines.too_few_healthy(good=good, min_nodes=rules.min_nodes, told=_bad(seats, GOOD))
        return Cause(kind=CauseKind.MEMBERSHIP, text=text), place, True
    if place is None:
        return Cause(kind=CauseKind.MEMBERSHIP, text=job_lines.UNKNOWN_FAILURE), None, True
    return seats[place].report.cause, place, False


def first_failure(seats: Sequence[Seat], decided_by: int | None) -> int | None:
    """The node that ended the cycle, or one whose end its own followed from, as far as the reports say."""
    if decided_by is not None and not seats[decided_by].report.cause.follows:
        return decided_by
    causes = [place for place, seat in enumerate(seats) if seat.state not in GOOD and not seat.report.cause.follows]
    causes.sort(key=lambda place: _LIKELY.index(seats[place].state))
    follow = [place for place, seat in enumerate(seats) if seat.state not in GOOD]
    return next(iter(causes), next(iter(follow), None) if decided_by is None else decided_by)


def finished(seats: Sequence[Seat]) -> str:
    """Return a note on a job that has succeeded; empty if it has on all its nodes."""
    count = sum(seat.has_finished for seat in seats)
    if count == len(seats):
        return ""
    return job_lines.finished_without(finished=count, nodes=len(seats), told=_bad(seats, (NodeState.SUCCEEDED,)))


def _bad(seats: Sequence[Seat], good: Sequence[NodeState]) -> str:
    return job_lines.joined(
        job_lines.bad(place, seat.name, seat.state.value, seat.report.cause.text)
        for place, seat in enumerate(seats)
        if seat.state not in good and not seat.leaving
    )
