"""Selection of the launcher that prints lines about the whole job: one, so that they aren't repeated per node. Pure.

A launcher that ends with a code other than 0 prints why in any case, because a node may have an output of its own.
Where all outputs go to one place, a reason common to all is printed by one launcher, too.

The printing launcher is at the lowest place of the cycle; when it is lost, the coordinator has the next one
`PrintJobLines`. A launcher that has had no place yet prints these lines, too: nothing is known of the others then.
"""

from __future__ import annotations

from megatron_ft.core.agent import cycle_lines
from megatron_ft.core.agent.effects import Exit, LauncherExit
from megatron_ft.core.agent.events import Event
from megatron_ft.core.job.actions import Begin, Leave, LeftOut, Say, StandBy
from megatron_ft.core.job.messages import End, PrintJobLines, Report
from megatron_ft.core.job.restart_policy import NodeState


class JobLinePrinter:
    """One per launcher. ``says_all``: it prints all lines.

    ``shares_output``: the output of all launchers of the job goes to one place.
    """

    def __init__(self, *, says_all: bool = False, shares_output: bool = False) -> None:
        self._says_all = says_all
        self._shares_output = shares_output
        self._speaks = True
        self._is_the_one = False
        """True if this launcher prints at the coordinator's order, not because nothing is known of the others."""
        self._unsaid = ""

    @property
    def is_spokesman(self) -> bool:
        """True if no other launcher prints lines about the whole job unless the user wants them all."""
        return self._speaks

    @property
    def speaks(self) -> bool:
        """True if this launcher prints lines about the whole job."""
        return self._says_all or self._speaks

    def for_all(self, text: str, *, ends_cycle: bool = False) -> list[Say]:
        """Return the line if this launcher prints such lines. One that ends a cycle is kept for later."""
        if self.speaks:
            return [Say(text)]
        self._unsaid = text if ends_cycle else self._unsaid
        return []

    def failed(self, report: Report) -> list[Say]:
        """Return the line on failed ranks of this node, if another launcher prints why the cycle ended."""
        is_news = report.state is NodeState.UNHEALTHY and not report.cause.follows
        return [Say(cycle_lines.failed_here(report.cycle, report.cause.text))] if is_news and not self.speaks else []

    def over(self, over: LauncherExit, left: Leave | None, said: str) -> list[Say]:
        """Return the last line of this launcher: ``said``, or the reason of the others, as in ``left``."""
        is_for_all = over.how in (Exit.SUCCEEDED, Exit.FAILED)
        if over.how in (Exit.LEFT, Exit.STAYED):
            said = over.text if over.code else cycle_lines.job_went_on(over.text)
            is_for_all = bool(over.code) and left is not None and left.is_of_all
        # the job has failed for all its launchers, and this one has no reason of its own
        is_end = over.code != 0 and over.how in (Exit.FAILED, Exit.LEFT, Exit.STAYED)
        is_same = is_end and left is not None and left.is_of_all and over.text in ("", left.text)
        if self._shares_output and is_same:
            return [Say(said)] if said and (self._says_all or self._is_the_one) else []
        if over.code and not self.speaks:
            said, self._unsaid = said or self._unsaid, ""
            is_for_all = False
        if not said:
            return []
        return self.for_all(said) if is_for_all else [Say(said)]

    def hear(self, event: Event) -> list[Say]:
        """Follow a decision of the coordinator. Return the lines to print."""
        match event:
            case Begin(held):
                self._speaks = self._is_the_one = held.place == 0
                self._unsaid = ""
            case StandBy():
                self._speaks = self._is_the_one = False
                self._unsaid = ""
            case LeftOut() | End(lost=True):
                self._is_the_one = False  # another launcher is asked to print
            case PrintJobLines():
                self._speaks = self._is_the_one = True
                unsaid, self._unsaid = self._unsaid, ""
                return [Say(unsaid)] if unsaid else []
        return []
