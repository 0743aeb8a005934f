"""Shared parts of the launcher's machine: its options, its phases, and the turn in which it takes an event."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.agent.edge import Effect, Readings
from megatron_ft.core.agent.job_line_printer import JobLinePrinter
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION
from megatron_ft.core.timeouts.learned import OUT_FIELD, SECTIONS_FIELD

LATE_NS = 500_000_000
"""Delay of a timer beyond which the whole node must have been stopped, and the ranks with it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options. Times are seconds; a timeout of None is none.

    Args:
        hang_signal: what a rank that is found hung gets first.
        ranks_are_python: a rank's first process is the script itself, not some command that may wrap it.
        checks_health: there is a command that says whether the node is fit.
        watches_collectives: report ranks that complete no collective for ``collectives_timeout_s``, where no enforced
        timeout applies to them. None: half of the timeout of their process group.
        ends_for_collectives: also end the cycle if ranks wait in a collective.
        learn: "off", "report", "on" or "reference".
        safety_factor: factor of the reference's rule.
        configured: those of `core.timeouts.learned.CONFIGURED_FIELDS` that the user has set.
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
    watches_collectives: bool = False
    collectives_timeout_s: float | None = None
    ends_for_collectives: bool = False
    says_all: bool = False
    shares_output: bool = False
    learn: str = "report"
    safety_factor: float = 5.0
    configured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """Rule for learned timeouts."""
        return "reference" if self.learn == "reference" else "budget"

    @property
    def configured_sections(self) -> Mapping[str, float | None]:
        """Sections that the user has configured, each with its timeout."""
        sections: Mapping[str, float | None] = self.configured.get(SECTIONS_FIELD) or {}
        return sections

    @property
    def caps(self) -> dict[str, float]:
        """Configured timeouts of sections, and of OUT_OF_SECTION."""
        timeouts = {**self.configured_sections, OUT_OF_SECTION: self.configured.get(OUT_FIELD)}
        return {name: float(timeout_s) for name, timeout_s in timeouts.items() if timeout_s is not None}


class AgentPhase(enum.Enum):
    """Phase of the launcher."""

    JOINING = "joining"
    CHECKING = "checking"
    """The health command runs."""
    ASIDE = "aside"
    READY = "ready"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    """Ranks are given time to end by themselves."""
    TERMINATING = "terminating"
    JUDGING = "judging"
    """Why the cycle has ended isn't known yet."""
    DONE = "done"
    """No rank is left, and not all nodes know yet how the job has ended."""
    LEAVING = "leaving"
    """The node has said goodbye, and waits until the others have received it."""
    EXCLUDED = "excluded"
    """The others go on without this node; the launcher waits for the end of the job."""
    OVER = "over"


@dataclass(kw_only=True)
class Step:
    """One event: its time, the ranks' readings, and the effects."""

    now_ns: int
    seen: Readings
    effects: list[Effect] = field(default_factory=list)
    printer: JobLinePrinter = field(default_factory=JobLinePrinter)

    @property
    def now_s(self) -> float:
        return self.now_ns / 1e9

    def do(self, *effects: Effect) -> None:
        """Append effects, in this order."""
        self.effects += effects

    def say_for_all(self, text: str) -> None:
        """Print a line about the whole job, unless another launcher does."""
        self.effects += self.printer.for_all(text)
