"""Shared parts of the launcher's machine: its options, and the turn in which it takes an event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ft.job.rules.actions import Say
from megatron_ft.launcher.rules.effects import Effect, OrderMonitor, Write
from megatron_ft.launcher.rules.events import Readings
from megatron_ft.launcher.rules.job_line_printer import JobLinePrinter
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.messages.monitor_messages import RankOrder

LATE_NS = 500_000_000
"""Delay of a timer beyond which the whole node must have been stopped, and the ranks with it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options. Times are seconds; a timeout of None is none.

    Args:
        hang_signal: what a rank that is found hung gets first.
        ranks_are_python: a rank's first process is the script itself, not some command that may wrap it.
        checks_health: there is a command that says whether the node is fit.
        health_interval_s: seconds from one check beside ranks to the next one; None: there are none.
        watches_collectives: report ranks that complete no collective for ``collectives_timeout_s``, where no enforced
            timeout applies to them. None: half of the timeout of their process group.
        ends_for_collectives: also end the cycle if ranks wait in a collective.
        says_all: this launcher prints lines about the whole job even if another one does.
        shares_output: the output of all launchers of the job goes to one place.
    """

    max_nodes: int = 1
    min_healthy: bool = False
    max_restarts: int = 0
    term_timeout_s: float = 1800.0
    stop_timeout_s: float = 5.0
    restart_grace_s: float = 0.1
    startup_timeout_s: float | None = None
    exit_timeout_s: float | None = None
    hang_signal: int = 9
    observe_only: bool = False
    ranks_are_python: bool = True
    checks_health: bool = False
    health_interval_s: float | None = None
    watches_collectives: bool = False
    collectives_timeout_s: float | None = None
    ends_for_collectives: bool = False
    says_all: bool = False
    shares_output: bool = False


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
        self.do(Say(text))

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
