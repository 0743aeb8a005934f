"""Hangs at the leader of a job: the evidence of all nodes is collected, within a time limit. A part of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import LOST_PEER, hang_cause, undetermined_hang
from megatron_ft.diagnosis.hang_diagnosis import blamed, review
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots, Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.link.base.wording import listed
from megatron_ft.link.facts.launcher import CauseKind

_NETWORK_S = 0.3
"""Seconds for the snapshots to arrive, added to the time in which a node collects its evidence."""


@dataclass(kw_only=True)
class Diagnosis:
    """Question about one hang, and the evidence that has come.

    Args:
        hang: of the node at the place ``asker``, which has detected it.
        unheard: places of nodes whose evidence hasn't come.
    """

    hang: Hang
    asker: int
    bound_s: float
    unheard: set[int]
    notes: list[RankSnapshot] = field(default_factory=list)


class HangsAtLeader(LeaderPart):
    """A rank hangs: all nodes are asked for evidence, once, and the cause is found in it."""

    HEARS = Hang | RankSnapshots
    SAYS = DiagnoseHang | Reviewed

    def __init__(self) -> None:
        self._cycle: JobCycle
        self._diagnosis: Diagnosis | None = None
        self._review: Diagnosis | None = None
        """The observe-only diagnosis: its ranks go on, whatever it finds."""

    @property
    def due_s(self) -> float | None:
        return None if self._review is None or self._cycle.outcome is not None else self._review.bound_s

    def begin(self, cycle: JobCycle) -> Answers:
        self._cycle, self._diagnosis, self._review = cycle, None, None
        return ()

    def joined(self, node: Node, place: int) -> Answers:
        if self._cycle.outcome is not None:
            return []
        open_ones = [each for each in (self._diagnosis, self._review) if each is not None and place in each.unheard]
        return [ToNodes(self._question(each), [place]) for each in open_ones]

    def _question(self, diagnosis: Diagnosis) -> DiagnoseHang:
        return DiagnoseHang(self._cycle.decision.cycle, diagnosis is self._review, looks=diagnosis.hang.decides)

    def hear(self, node: Node, place: int, message: Any, now_s: float) -> Answers:
        if message.cycle != self._cycle.decision.cycle:
            return []
        if isinstance(message, Hang):
            return self._begin_diagnosis(place, message, now_s)
        diagnosis = self._review if message.passive else self._diagnosis
        if diagnosis is not None and place in diagnosis.unheard:
            name = node.name  # of ranks that have exited only their launcher tells, which knows no name
            diagnosis.notes += [each if each.host else replace(each, host=name) for each in message.notes]
            if not message.more:
                diagnosis.unheard.discard(place)
        return []

    def _begin_diagnosis(self, place: int, hang: Hang, now_s: float) -> Answers:
        """Ask all nodes for evidence. Of thousands that detect the same hang all but the first cost nothing."""
        cycle = self._cycle
        # a question that decides takes the place of one that only reports
        is_asked = self._review is not None and (self._review.hang.decides or not hang.decides)
        if (hang.passive and is_asked) or self._diagnosis is not None or cycle.outcome is not None:
            return []
        # also of a launcher whose connection has just ended: its end may be what the others' ranks have felt
        diagnosis = Diagnosis(
            hang=hang,
            asker=place,
            bound_s=now_s + EVIDENCE_S + _NETWORK_S,
            unheard=set(range(len(cycle.seats))),
        )
        if hang.passive:
            self._review = diagnosis
        else:
            self._diagnosis = diagnosis
        return [ToNodes(self._question(diagnosis))]

    def tick(self, now_s: float) -> Answers:
        """Tell all nodes the result of an observe-only diagnosis, once it is known, if no rank has moved since."""
        diagnosis, cycle = self._review, self._cycle
        if diagnosis is None or cycle.outcome is not None or self._is_open(diagnosis, now_s):
            return []
        self._review = None
        found = review(
            diagnosis.notes,
            diagnosis.hang.verdict,
            cycle=cycle.decision.cycle,
            asker=diagnosis.asker,
            are_all=not diagnosis.unheard,
            several=len(cycle.seats) > 1,
            decides=diagnosis.hang.decides,
        )
        return [] if found is None else [ToNodes(found)]

    def _is_open(self, diagnosis: Diagnosis, now_s: float) -> bool:
        """Return True if the cause may still become known."""
        return bool(diagnosis.unheard - self._cycle.gone) and now_s < diagnosis.bound_s

    def verdict(self, now_s: float) -> float | None:
        """End the cycle: for a lost node if there is one and the notes name no rank, since the others wait for its."""
        diagnosis, cycle = self._diagnosis, self._cycle
        if diagnosis is None:
            return None
        first = diagnosis.hang.verdict
        is_of_lost_peer = first.kind == LOST_PEER
        if is_of_lost_peer and cycle.judged is not None and cycle.own_failures:
            self._diagnosis = None  # what that node did explains the peers that were lost
            return None
        if self._is_open(diagnosis, now_s):
            return diagnosis.bound_s
        self._diagnosis = None
        found = blamed(diagnosis.notes, first, are_all=not diagnosis.unheard, several=len(cycle.seats) > 1)
        rank = None if found is None else found.rank
        if is_of_lost_peer and found is None:
            return None  # the report on the ranks that lost their peer is still on its way if nothing is judged
        place, judged = diagnosis.asker, cycle.judged
        told = {at: cycle.seats[at].report.cause for at in cycle.own_failures}
        exits = [
            at for at, cause in told.items() if cause.rank == rank is not None and cause.kind is not CauseKind.HANG
        ]
        if not is_of_lost_peer:
            if rank is None and judged is not None and cycle.seats[judged[1]].state is NodeState.LOST:
                place, found = judged[1], None
            elif found is not None and found.kind is CauseKind.HANG and exits:
                place, found = exits[0], None  # its node has said how it ended
            else:
                is_known = found is not None or first.stopped  # else it may only have waited for another rank
                detected = hang_cause(first) if is_known else undetermined_hang(first, detail="root cause undetermined")
                cycle.changed(place, Report(cycle.decision.cycle, NodeState.UNHEALTHY, detected))
        if found is not None and rank is None and diagnosis.unheard:
            unheard = listed([job_lines.node(at, cycle.seats[at].node.name) for at in sorted(diagnosis.unheard)])
            detail = listed([found.detail, f"no evidence from {unheard}"], joint="; ")
            found = replace(found, detail=detail, follows=is_of_lost_peer)  # a node's own failure explains more
        cycle.failed(place, diagnosis.hang.reached, found)
        return None
