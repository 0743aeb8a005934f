"""Orders of the coordinator and reports of this node for the last cycle that has begun. Pure."""

from __future__ import annotations

from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.messages import Dismiss, End, Report, Stay, Verdict
from megatron_ft.job.rules.restart_policy import Outcome


class CoordinatorView:
    """Orders of the coordinator that apply to this launcher now: to the agent, and to torch's rendezvous."""

    def __init__(self) -> None:
        self.begun: Assignment | None = None
        """The last cycle that this node has a place in."""
        self.taken: Assignment | None = None
        """The last cycle whose ranks this node was to run."""
        self.stands_by = False
        """True if other nodes have begun a cycle without this one."""
        self.is_left_out = False
        """True if the job goes on without this node, for good."""
        self.left: Dismiss | None = None
        """Set once this launcher's job is over."""
        self.told: Report | None = None
        """Last report of this node on the cycle."""
        self.is_cut_off = False
        """True if the cycle ended here only, because no coordinator could be reached."""
        self.end: End | None = None
        """End of the cycle that was taken; None while it is unknown."""
        self._verdict: Verdict | None = None

    def hear(self, event: Assignment | End | Verdict | Stay | Dismiss) -> None:
        """Note a decision of the coordinator."""
        match event:
            case Assignment(place=None):
                self.stands_by = True
            case Assignment():
                self.begun = event
                self.end = self._verdict = self.told = None
                self.is_cut_off = self.stands_by = False
            case Stay():
                self.is_left_out = True
            case End():
                self.end, self.is_cut_off = event, event.is_cut_off
            case Verdict():
                if self.begun is not None and event.cycle == self.begun.decision.cycle:
                    self._verdict = event
            case Dismiss():
                self.left = self.left or event

    def take(self) -> Assignment:
        """Run the ranks of the cycle that has begun."""
        assert self.begun is not None
        self.taken = self.begun
        return self.begun

    @property
    def has_begun(self) -> bool:
        """True if another cycle than the one taken has begun. If that one still runs, its end was never received."""
        return self.begun is not self.taken

    @property
    def place(self) -> int | None:
        """Place of this node in the cycle that was taken."""
        return None if self.taken is None else self.taken.place

    @property
    def is_over(self) -> bool:
        """True if the cycle that was taken has ended."""
        return self.end is not None or self.left is not None or self.has_begun

    @property
    def is_lost(self) -> bool:
        """True if no verdict on the cycle can come any more."""
        return self.end is None or self.end.lost or self.has_begun

    @property
    def lost(self) -> str:
        """Why the others have given this node up, in words; empty if unknown, or if they haven't."""
        return self.end.text if self.end is not None and self.end.lost else ""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the cycle."""
        if self.has_begun:
            return Outcome.MEMBERSHIP
        return Outcome.STOPPED if self.end is None else self.end.outcome

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the cycle; None while it is unknown."""
        return None if self.has_begun else self._verdict
