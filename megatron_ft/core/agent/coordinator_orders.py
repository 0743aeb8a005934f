"""What the coordinator and this node have told each other of the cycle that has begun last. Pure."""

from __future__ import annotations

from megatron_ft.core.job.assignment import Assignment
from megatron_ft.core.job.edge import Begin, Conclude, EndRanks, Leave, LeftOut, StandBy
from megatron_ft.core.job.messages import End, Report, Verdict
from megatron_ft.core.job.restart_policy import NodeState, Outcome


class CoordinatorOrders:
    """What counts of that for this launcher now."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.stands_by = False
        """Other nodes have begun a cycle without this one."""
        self.is_left_out = False
        """The job goes on without this node, for good."""
        self.left: Leave | None = None
        """This launcher's job is over."""
        self.told: Report | None = None
        """What this node has reported of the cycle."""
        self.is_cut_off = False
        """The cycle ended here only, because no coordinator could be reached."""
        self._end: End | None = None
        self._verdict: Verdict | None = None

    def hear(self, event: Begin | StandBy | EndRanks | Conclude | LeftOut | Leave) -> None:
        """The coordinator has decided something."""
        match event:
            case Begin(held):
                self.assignment.begin(held)
                self._end = self._verdict = self.told = None
                self.is_cut_off = self.stands_by = False
            case StandBy():
                self.stands_by = True
            case LeftOut():
                self.is_left_out = True
            case EndRanks(end, is_cut_off):
                self._end, self.is_cut_off = end, is_cut_off
            case Conclude(verdict):
                begun = self.assignment.begun
                if begun is not None and verdict.cycle == begun.decision.cycle:
                    self._verdict = verdict
            case Leave():
                self.left = self.left or event

    def may_be_news(self, state: NodeState) -> bool:
        """Whether to send a report of this state: once, and again if it no longer follows from another node's.

        A cycle whose successor has begun needs no report any more.
        """
        if self.assignment.has_begun:
            return False
        return self.told is None or self.told.state is not state or self.told.follows

    def report(self, report: Report) -> bool:
        """Take note of a report that is about to be sent; returns False if it is no news."""
        told = self.told
        if told is not None and (told.state, told.follows) == (report.state, report.follows):
            return False
        self.told = report
        return True

    @property
    def is_over(self) -> bool:
        """The cycle that was taken has ended."""
        return self._end is not None or self.left is not None or self.assignment.has_begun

    @property
    def is_lost(self) -> bool:
        """Whether no verdict on the cycle can come any more."""
        return self._end is None or self._end.lost or self.assignment.has_begun

    @property
    def lost(self) -> str:
        """Why the others have given this node up, in words; empty if that isn't known, or if they haven't."""
        return self._end.text if self._end is not None and self._end.lost else ""

    @property
    def restarts(self) -> bool:
        """Another cycle is to follow."""
        return self._end is not None and self._end.restarts

    @property
    def outcome(self) -> Outcome:
        """How it has ended."""
        if self.assignment.has_begun:
            return Outcome.MEMBERSHIP
        return Outcome.STOPPED if self._end is None else self._end.outcome

    @property
    def verdict(self) -> Verdict | None:
        """Why it has ended; None as long as that isn't known."""
        return None if self.assignment.has_begun else self._verdict
