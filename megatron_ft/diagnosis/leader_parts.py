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
from megatron_ft.job.rules.job_cycle import Hold, JobCycle, PartVerdict
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import NodeState, Outcome, Reached
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.link.facts.shared import RankHung

_NETWORK_S = 0.3
"""Seconds for the snapshots to arrive, added to the time in which a node collects its evidence."""


@dataclass(kw_only=True)
class Diagnosis:
    """Question about one hang, and the evidence that has come.

    Args:
        first: verdict of the node at the place ``asker``, which has detected the hang.
        decides: as in `Hang`.
        awaited: places of nodes whose evidence is to come; lost: of those that have been lost meanwhile.
        are_all: all nodes of the cycle were asked.
    """

    first: RankHung
    asker: int
    decides: bool
    bound_s: float
    awaited: set[int]
    are_all: bool
    lost: set[int] = field(default_factory=set)
    notes: list[RankSnapshot] = field(default_factory=list)

    @property
    def is_of_lost_peer(self) -> bool:
        """True if begun for a rank that has failed because it had lost another one."""
        return self.first.kind == LOST_PEER

    @property
    def unheard(self) -> list[int]:
        """Places of nodes whose evidence hasn't come."""
        return sorted(self.awaited | self.lost)

    @property
    def is_whole(self) -> bool:
        return self.are_all and not self.unheard


class HangsAtLeader(LeaderPart):
    """A rank hangs: all nodes are asked for evidence, once, and the cause is found in it."""

    HEARS = Hang | RankSnapshots
    SAYS = DiagnoseHang | Reviewed

    def __init__(self) -> None:
        self._cycle: JobCycle
        self._diagnosis: Diagnosis | None = None
        self._reached: Reached | None = None
        self._review: Diagnosis | None = None
        """The observe-only diagnosis: its ranks go on, whatever it finds."""

    @property
    def due_s(self) -> float | None:
        return None if self._review is None else self._review.bound_s

    def begin(self, cycle: JobCycle) -> Answers:
        self._cycle, self._diagnosis, self._review = cycle, None, None
        return ()

    def joined(self, node: Node, place: int) -> Answers:
        if self._cycle.outcome is not None:
            return []
        open_ones = [each for each in (self._diagnosis, self._review) if each is not None and place in each.awaited]
        return [ToNodes(self._question(each), [place]) for each in open_ones]

    def _question(self, diagnosis: Diagnosis) -> DiagnoseHang:
        is_passive = diagnosis is self._review
        return DiagnoseHang(self._cycle.decision.cycle, is_passive, looks=diagnosis.decides)

    def hear(self, node: Node, place: int, message: Any, now_s: float) -> Answers:
        if message.cycle != self._cycle.decision.cycle:
            return []
        if isinstance(message, Hang):
            return self._begin_diagnosis(place, message, now_s)
        diagnosis = self._review if message.passive else self._diagnosis
        if diagnosis is not None and place in diagnosis.awaited:
            name = node.name  # of ranks that have exited only their launcher tells, which knows no name
            diagnosis.notes += [each if each.host else replace(each, host=name) for each in message.notes]
            if not message.more:
                diagnosis.awaited.discard(place)
        return []

    def _begin_diagnosis(self, place: int, hang: Hang, now_s: float) -> Answers:
        """Ask all nodes for evidence. Of thousands that detect the same hang all but the first cost nothing."""
        cycle = self._cycle
        # a question that decides takes the place of one that only reports
        is_asked = self._review is not None and (self._review.decides or not hang.decides)
        is_refused = is_asked if hang.passive else cycle.rules.min_healthy
        if is_refused or self._diagnosis is not None or cycle.outcome is not None:
            return []
        # also of a launcher whose connection has just ended: its end may be what the others' ranks have felt
        asked = {at for at in range(len(cycle.seats)) if at not in cycle.gone}
        diagnosis = Diagnosis(
            first=hang.verdict,
            asker=place,
            decides=hang.decides,
            bound_s=now_s + EVIDENCE_S + _NETWORK_S,
            awaited=asked,
            are_all=len(asked) == len(cycle.seats),
        )
        if hang.passive:
            self._review = diagnosis
        else:
            self._diagnosis, self._reached = diagnosis, hang.reached
        return [ToNodes(self._question(diagnosis))]

    def tick(self, now_s: float) -> Answers:
        """Tell all nodes the result of an observe-only diagnosis, once it is known, if no rank has moved since."""
        diagnosis, cycle = self._review, self._cycle
        if diagnosis is None or (self._is_open(diagnosis, now_s) and cycle.outcome is None):
            return []
        self._review = None
        if cycle.outcome is not None:
            return []
        found = review(
            diagnosis.notes,
            diagnosis.first,
            cycle=cycle.decision.cycle,
            asker=diagnosis.asker,
            are_all=diagnosis.is_whole,
            several=len(cycle.seats) > 1,
            decides=diagnosis.decides,
        )
        return [] if found is None else [ToNodes(found)]

    def _is_open(self, diagnosis: Diagnosis, now_s: float) -> bool:
        """Return True if the cause may still become known."""
        diagnosis.lost |= diagnosis.awaited & self._cycle.gone
        diagnosis.awaited -= self._cycle.gone
        return bool(diagnosis.awaited) and now_s < diagnosis.bound_s

    def verdict(self, now_s: float) -> Hold | PartVerdict | None:
        """End the cycle: for a lost node if there is one and the notes name no rank, since the others wait for its."""
        diagnosis, cycle = self._diagnosis, self._cycle
        if diagnosis is None:
            return None
        if diagnosis.is_of_lost_peer and (explained := cycle.explained) is not None:
            self._diagnosis = None  # what that node did explains the peers that were lost
            return PartVerdict(*explained)
        if self._is_open(diagnosis, now_s):
            return Hold(diagnosis.bound_s)
        self._diagnosis = None
        found = blamed(diagnosis.notes, diagnosis.first, are_all=diagnosis.is_whole, several=len(cycle.seats) > 1)
        lost = None if cycle.judged is None else cycle.judged[1]
        names_rank = found is not None and found.rank is not None
        if diagnosis.is_of_lost_peer and found is None:
            return None  # the report on the ranks that lost their peer is still on its way if nothing is judged
        if not diagnosis.is_of_lost_peer:
            if lost is not None and cycle.seats[lost].state is NodeState.LOST and not names_rank:
                return PartVerdict(Outcome.FAILED, lost, self._reached)
            exited = [place for place in cycle.own_failures if self._has_exited(place, found)]
            if exited:  # its node has said how it ended
                return PartVerdict(Outcome.FAILED, exited[0], self._reached)
            self._report(diagnosis, found)
        if found is not None and not names_rank and diagnosis.unheard:
            unheard = [job_lines.node(place, cycle.seats[place].name) for place in diagnosis.unheard]
            found = replace(found, detail=job_lines.joined([found.detail, job_lines.no_evidence(unheard)]))
        is_weak = diagnosis.is_of_lost_peer and bool(diagnosis.unheard) and not names_rank
        return PartVerdict(Outcome.FAILED, diagnosis.asker, self._reached, found, is_weak=is_weak)

    def _has_exited(self, place: int, found: Cause | None) -> bool:
        """Return True if that node has failed by the end of the rank that was found to hang, and not by its hang."""
        if found is None or found.kind is not CauseKind.HANG or found.rank is None:
            return False
        cause = self._cycle.seats[place].report.cause
        return cause.rank == found.rank and cause.kind is not CauseKind.HANG

    def _report(self, diagnosis: Diagnosis, found: Cause | None) -> None:
        """Report the hang for the node that has detected it."""
        first = diagnosis.first
        cause = hang_cause(first)
        if found is None and not first.stopped:  # without evidence it may only have waited for another rank
            cause = undetermined_hang(first, detail="root cause undetermined")
        report = Report(self._cycle.decision.cycle, NodeState.UNHEALTHY, cause)
        self._cycle.seats[diagnosis.asker].change(report)
