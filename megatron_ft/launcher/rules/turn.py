"""Shared parts of the launcher's machine: its options, the turn in which it takes an event, and who prints what.

One launcher prints the lines about the whole job, so that they aren't repeated per node: the one at place 0, or another
one that the leader names, because that node is gone. A launcher that has had no place yet prints them, too: nothing is
known of the others. A launcher that ends with a code other than 0 prints why in any case, because a node may have an
output of its own. Where all outputs go to one place, a reason common to all is printed by one launcher, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ft.config.config import ConfigValues
from megatron_ft.config.launcher_options import MIN_HEALTHY
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.messages import Dismiss, Tell, Verdict
from megatron_ft.launcher.rules import cycle_lines
from megatron_ft.launcher.rules.events import Effect, Event, Exit, LauncherExit, OrderMonitor, Readings, Write
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.messages.monitor_messages import RankOrder

LATE_NS = 500_000_000
"""Delay of a timer beyond which the whole node must have been stopped, and the ranks with it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by which the machine decides.

    Args:
        given: the user's options; a new one of these needs no field here.
        ranks_are_python: a rank's first process is the script itself, not some command that may wrap it.
        checks_health: there is a command that says whether the node is fit.
        says_all: this launcher prints lines about the whole job even if another one does.
        shares_output: the output of all launchers of the job goes to one place.
    """

    given: ConfigValues
    instance: str = ""
    max_nodes: int = 1
    max_restarts: int = 0
    ranks_are_python: bool = True
    checks_health: bool = False
    says_all: bool = False
    shares_output: bool = False

    @property
    def min_healthy(self) -> bool:
        """True if failed ranks of a node don't end the cycle as long as enough nodes are healthy."""
        return self.given.restart_policy == MIN_HEALTHY


@dataclass
class JobLinePrinter:
    """Printer of lines about the whole job; one per launcher."""

    options: Options
    is_named: bool | None = None
    """True if this launcher prints the lines about the job, False if another one does; None: that isn't known."""
    unsaid: str = ""
    """Line on the end of the last cycle, which another launcher was to print."""

    def hear(self, event: Event) -> list[Tell]:
        """Note which launcher prints from now on; return why the cycle ended, if the last one may not have."""
        lines = []
        match event:
            case Assignment(place=place):
                self.is_named, self.unsaid = place == 0, ""
            case Verdict(printer=printer) | Tell(printer=printer) | Dismiss(printer=printer) if printer:
                self.is_named = printer == self.options.instance
                if self.is_named and self.unsaid:
                    lines, self.unsaid = [Tell(self.unsaid)], ""
        if isinstance(event, Tell) and (self.speaks or not event.printer):
            lines.append(Tell(event.text))
        return lines

    @property
    def is_spokesman(self) -> bool:
        """True if no other launcher prints lines about the whole job unless the user wants them all."""
        return self.is_named is not False

    @property
    def speaks(self) -> bool:
        """True if this launcher prints lines about the whole job."""
        return self.options.says_all or self.is_spokesman

    def for_all(self, text: str, *, ends_cycle: bool = False) -> list[Tell]:
        """Return the line if this launcher prints such lines. One that ends a cycle is kept for later."""
        self.unsaid = text if ends_cycle and not self.speaks else self.unsaid
        return [Tell(text)] if self.speaks else []

    def over(self, over: LauncherExit, left: Dismiss | None, said: str) -> list[Tell]:
        """Return the last line of this launcher: ``said``, or the reason of the others, as in ``left``."""
        is_for_all = over.how in (Exit.SUCCEEDED, Exit.FAILED)
        if over.how in (Exit.LEFT, Exit.STAYED):
            said = over.text if over.code else cycle_lines.job_went_on(over.text)
            is_for_all = bool(over.code) and left is not None and left.is_of_all
        # the job has failed for all its launchers, and this one has no reason of its own
        is_end = over.code != 0 and over.how in (Exit.FAILED, Exit.LEFT, Exit.STAYED)
        is_same = is_end and left is not None and left.is_of_all and over.text in ("", left.text)
        if self.options.shares_output and is_same:
            return [Tell(said)] if said and (self.options.says_all or self.is_named) else []
        said = said or (self.unsaid if over.code else "")
        return [Tell(said)] if said and (self.speaks or over.code or not is_for_all) else []


@dataclass(kw_only=True)
class Turn:
    """One event: its time, the ranks' readings, and the effects.

    ``runs``: number of the cycle whose ranks start or run here; None if none does, or it is over. ``is_ready``: this
    node waits for a cycle to begin.
    """

    now_ns: int
    seen: Readings
    printer: JobLinePrinter
    runs: int | None = None
    is_ready: bool = False
    effects: list[Effect] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return self.now_ns / 1e9

    def do(self, *effects: Effect) -> None:
        """Append effects, in this order."""
        self.effects += effects

    def say(self, text: str) -> None:
        """Print a line about this node."""
        self.do(Tell(text))

    def say_for_all(self, text: str) -> None:
        """Print a line about the whole job, unless another launcher does."""
        self.effects += self.printer.for_all(text)

    def write(self, record: Record) -> None:
        """Write a record to the event log."""
        self.do(Write(record))

    def order(self, local_ranks: Iterable[int], order: RankOrder) -> None:
        """Send an order to the monitors of these ranks."""
        self.do(*(OrderMonitor(local_rank, order) for local_rank in sorted(local_ranks)))

    def board(self, local_rank: int) -> BoardSnapshot | None:
        """Return the reading of a rank's board."""
        return self.seen.boards[local_rank]
