"""Which lines this launcher prints: those about the whole job, where it is the one that does, and its own. Pure.

One launcher prints them, so that they aren't repeated per node: the one at place 0, or another one that the leader
names, because that node is gone. A launcher that has had no place yet prints them, too: nothing is known of the others.
A launcher that ends with a code other than 0 prints why in any case, because a node may have an output of its own.
Where all outputs go to one place, a reason common to all is printed by one launcher, too.
"""

from __future__ import annotations

from megatron_ft.job.rules.actions import Begin, Leave, PrintsJobLines, Say, StandBy
from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.launcher.rules import cycle_lines
from megatron_ft.launcher.rules.effects import Exit, LauncherExit
from megatron_ft.launcher.rules.events import Event


class JobLinePrinter:
    """One per launcher. ``says_all``: it prints all lines.

    ``shares_output``: the output of all launchers of the job goes to one place.
    """

    def __init__(self, *, says_all: bool = False, shares_output: bool = False) -> None:
        self._says_all = says_all
        self._shares_output = shares_output
        self._unsaid = ""
        self.is_named: bool | None = None
        """True if this launcher prints the lines about the job, False if another one does; None: that isn't known."""

    def hear(self, event: Event) -> list[Say]:
        """Note which launcher prints from now on; return why the cycle ended, if the last one may not have."""
        unsaid = ""
        match event:
            case Begin(held):
                self.is_named, self._unsaid = held.place == 0, ""
            case StandBy():
                self.is_named, self._unsaid = False, ""
            case PrintsJobLines(is_printer):
                self.is_named = is_printer
                if is_printer:
                    unsaid, self._unsaid = self._unsaid, ""
        return [Say(unsaid)] if unsaid else []

    @property
    def is_spokesman(self) -> bool:
        """True if no other launcher prints lines about the whole job unless the user wants them all."""
        return self.is_named is not False

    @property
    def speaks(self) -> bool:
        """True if this launcher prints lines about the whole job."""
        return self._says_all or self.is_spokesman

    def for_all(self, text: str, *, ends_cycle: bool = False) -> list[Say]:
        """Return the line if this launcher prints such lines. One that ends a cycle is kept for later."""
        self._unsaid = text if ends_cycle and not self.speaks else self._unsaid
        return [Say(text)] if self.speaks else []

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
            return [Say(said)] if said and (self._says_all or self.is_named) else []
        said = said or (self._unsaid if over.code else "")
        return [Say(said)] if said and (self.speaks or over.code or not is_for_all) else []
