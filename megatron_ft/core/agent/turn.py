"""What the parts of the launcher's machine share: its options, its phases, and the turn in which it takes an event."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from megatron_ft.core.agent.edge import Effect, Readings
from megatron_ft.core.agent.job_line_printer import JobLinePrinter

LATE_NS = 500_000_000
"""A timer that fires so much later than it was due shows that the whole node was stopped, and the ranks with it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. Times are seconds; a timeout of None is none.

    Args:
        hang_signal: what a rank that is found hung gets first.
        ranks_are_python: a rank's first process is the script itself, not some command that may wrap it.
        meets_elsewhere: the nodes meet by a rendezvous of torch's own, and this launcher coordinates only itself.
        checks_health: there is a command that says whether the node is fit.
        collectives_timeout_s: report ranks whose scripts call no hooks if they complete no collective for so long;
            None: they aren't watched. ``ends_for_collectives``: and if some wait in one, the cycle is ended.
        says_all: this launcher says what concerns the whole job, whether another one says it or not.
        shares_output: what the launchers of the job print goes to one place.
    """

    min_nodes: int = 1
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
    meets_elsewhere: bool = False
    checks_health: bool = False
    collectives_timeout_s: float | None = None
    ends_for_collectives: bool = False
    says_all: bool = False
    shares_output: bool = False

    @property
    def decides_alone(self) -> bool:
        """Each node ends its own ranks where one hangs: the coordinator doesn't end the cycle for all."""
        return self.min_healthy or self.meets_elsewhere


class AgentPhase(enum.Enum):
    """What the launcher is about."""

    JOINING = "joining"
    CHECKING = "checking"
    """Its health command runs."""
    ASIDE = "aside"
    READY = "ready"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    """Ranks are given time to end by themselves."""
    TERMINATING = "terminating"
    JUDGING = "judging"
    """Why the cycle has ended isn't known yet."""
    AGREEING = "agreeing"
    """The ranks have finished; torch's rendezvous has the others wait, too."""
    DONE = "done"
    """None of its ranks is left, and not all nodes know yet how the job has ended."""
    LEAVING = "leaving"
    """The others have received that this node leaves."""
    EXCLUDED = "excluded"
    """They go on without it, and the launcher waits for the end of the job."""
    OVER = "over"


@dataclass(kw_only=True)
class Turn:
    """One event: when it is, how the ranks look, and what is to be done."""

    now_ns: int
    seen: Readings
    effects: list[Effect] = field(default_factory=list)
    printer: JobLinePrinter = field(default_factory=JobLinePrinter)

    @property
    def now_s(self) -> float:
        """The same in seconds."""
        return self.now_ns / 1e9

    def do(self, *effects: Effect) -> None:
        """Ask for these, in this order."""
        self.effects += effects

    def say_for_all(self, text: str) -> None:
        """Say what concerns the whole job, unless another launcher does."""
        self.effects += self.printer.for_all(text)
