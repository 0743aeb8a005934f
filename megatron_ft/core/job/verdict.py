"""Why a cycle ended, in words, and what follows: from the reports of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.job.messages import Report, Rules, Verdict
from megatron_ft.core.restart_policy import Action, CycleEnd, NodeState, Outcome

__all__ = ["GOOD", "Seat", "first_failure", "node_words", "verdict_on"]

GOOD = (NodeState.HEALTHY, NodeState.SUCCEEDED)
_FINAL = (NodeState.SUCCEEDED, NodeState.EXCLUDED)
"""What a node reaches by itself; that its launcher ends afterwards changes nothing."""
_SHOWN = 8


@dataclass(slots=True)
class Seat:
    """A place in a cycle, and how its node stands."""

    report: Report
    name: str = ""
    instance: str = ""
    missing_s: float | None = None
    """Since when nobody is connected who has it."""
    leaving: str = ""
    """Its node has said farewell, and why; all its ranks had ended with 0."""

    @property
    def state(self) -> NodeState:
        """Of the node."""
        return self.report.state

    def change(self, report: Report) -> bool:
        """Take a report; False if it says nothing new."""
        if self.state in _FINAL or (report.state is self.state and not (self.report.follows and not report.follows)):
            return False
        self.report = report
        return True


def node_words(place: int, seat: Seat) -> str:
    """A node by its place and its host's name."""
    return f"node {place} ({seat.name})" if seat.name else f"node {place}"


def verdict_on(
    rules: Rules,
    seats: Sequence[Seat],
    outcome: Outcome,
    *,
    cycle: int,
    restarts: int,
    stalled: int,
    decided_by: int | None,
    found: Cause | None,
    shutdown: tuple[int | None, str] | None,
    nodes_left: int,
    joining: int,
) -> Verdict:
    """``decided_by`` is the place of the node whose report was the one that ended the cycle, ``shutdown`` who asked for
    the end of the job and in which words; ``restarts`` were used before, ``joining`` nodes are wanted in addition.
    """
    excluded = any(seat.state is NodeState.EXCLUDED for seat in seats)
    end = CycleEnd(
        cycle=cycle,
        outcome=outcome,
        restarts_before=restarts,
        nodes_left=nodes_left if excluded else None,
        stalled=stalled,
    )
    decision = rules.policy.decide(end)
    code = 0 if decision.action is Action.FINISH else rules.no_progress_code if decision.no_progress else 1
    cause, node = _cause(rules, seats, outcome, decided_by, found, shutdown, joining)
    return Verdict(
        cycle=cycle,
        outcome=outcome,
        text=cause.text,
        kind=cause.kind,
        node=node,
        rank=cause.rank,
        iteration=cause.iteration,
        detail=cause.detail,
        action=decision.action,
        restarts_left=decision.restarts_left,
        reason=decision.reason,
        code=code,
    )


def _cause(
    rules: Rules,
    seats: Sequence[Seat],
    outcome: Outcome,
    decided_by: int | None,
    found: Cause | None,
    shutdown: tuple[int | None, str] | None,
    joining: int,
) -> tuple[Cause, int | None]:
    if outcome is Outcome.STOPPED and shutdown is not None:
        node, text = shutdown
        where = "" if node is None else f"on {node_words(node, seats[node])} "
        return Cause(kind=CauseKind.REQUEST, text=f"{where}{text}"), node
    if outcome is Outcome.SUCCEEDED:
        return Cause(kind=CauseKind.REQUEST, text=_finished(seats)), None
    if found is not None:
        return found, decided_by
    if outcome is Outcome.MEMBERSHIP:
        left = [(p, seat) for p, seat in enumerate(seats) if seat.state is NodeState.EXCLUDED]
        told = _listed(f"{node_words(p, seat)} leaves the job: {seat.report.text}" for p, seat in left)
        nodes = "1 node waits" if joining == 1 else f"{joining} nodes wait"
        return Cause(kind=CauseKind.MEMBERSHIP, text=told or f"{nodes} to join"), left[0][0] if left else None
    bad = [(p, seat) for p, seat in enumerate(seats) if seat.state not in GOOD]
    if rules.min_healthy and len(seats) > 1:
        told = _listed(f"{node_words(p, seat)} is {seat.state.value}: {seat.report.text}" for p, seat in bad)
        good = len(seats) - len(bad)
        return Cause(kind=CauseKind.MEMBERSHIP, text=f"{good} of at least {rules.min_nodes}: {told}"), decided_by
    place = first_failure(seats, decided_by)
    if place is None:
        return Cause(kind=CauseKind.MEMBERSHIP, text="a failure that only the lost coordinator knew of"), None
    seat, report = seats[place], seats[place].report
    text = report.text if len(seats) == 1 else f"{node_words(place, seat)}: {report.text}"
    return Cause(kind=report.kind or CauseKind.MEMBERSHIP, text=text, rank=report.rank), place


def first_failure(seats: Sequence[Seat], decided_by: int | None) -> int | None:
    """The node that ended the cycle, or one whose end its own followed from, as far as that was told."""
    if decided_by is not None and not seats[decided_by].report.follows:
        return decided_by
    causes = [place for place, seat in enumerate(seats) if seat.state not in GOOD and not seat.report.follows]
    causes.sort(key=lambda place: seats[place].state is NodeState.LOST)
    follow = [place for place, seat in enumerate(seats) if seat.state not in GOOD]
    return next(iter(causes), next(iter(follow), None) if decided_by is None else decided_by)


def _finished(seats: Sequence[Seat]) -> str:
    bad = [(place, seat) for place, seat in enumerate(seats) if seat.state is not NodeState.SUCCEEDED]
    if not bad:
        return ""
    told = _listed(f"{node_words(place, seat)} is {seat.state.value}: {seat.report.text}" for place, seat in bad)
    return f"the job finished on {len(seats) - len(bad)} of {len(seats)} nodes: {told}"


def _listed(parts: Iterable[str]) -> str:
    listed = list(parts)
    more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    return "; ".join([*listed[:_SHOWN], *more])
