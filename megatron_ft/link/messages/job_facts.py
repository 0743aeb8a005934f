"""A launcher's facts about its job on this node, as shown by `megatron-ft status`. Pure."""

from __future__ import annotations

import enum

from megatron_ft.diagnosis.evidence import OpenSection
from megatron_ft.diagnosis.waits import RankLag
from megatron_ft.link.base.codec import Fact, Finite, Int, Message
from megatron_ft.link.facts.reported_hang import ReportedHang


class RankState(enum.Enum):
    """State of a rank; if several apply, the first of these."""

    EXITED = "exited"
    HUNG = "hung"
    """Found hung, and being ended."""
    DAMAGED = "damaged"
    """The board was written over: hangs of this rank are not detected until its next cycle."""
    STOPPED = "stopped"
    """The process was stopped by a signal, or a debugger holds it."""
    NOT_ATTACHED = "not_attached"
    """Monitoring hasn't begun yet."""
    CLOSING = "closing"
    """Monitoring has ended: the board isn't checked any more."""
    PAUSED = "paused"
    RUNNING = "running"


class TimeoutUse(Fact, frozen=True):
    """A running timeout, in seconds; ``share`` reaches 1 when the rank is found hung."""

    kind: str
    """Value of a ``HangKind``."""
    section: str | None
    used_s: Finite
    timeout_s: Finite

    @property
    def share(self) -> float:
        """Used share of the timeout."""
        return self.used_s / self.timeout_s


class RankRow(Fact, frozen=True, kw_only=True):
    """One rank at one moment. Times are seconds."""

    rank: Int
    local_rank: Int
    pid: Int
    state: RankState
    exit_code: Int | None = None
    iteration: Int | None = None
    sections: tuple[OpenSection, ...] = ()
    """Outermost first."""
    out_of_section_s: Finite | None = None
    """Time since no section is open; None while one is, and for a rank that has never opened one."""
    heartbeat_s: Finite | None = None
    """Time since the last heartbeat; None without one."""
    timeout: TimeoutUse | None = None
    """Running timeout with the highest share; None without one."""


class JobPhase(enum.Enum):
    """Phase of the job, as seen by this node's launcher."""

    STARTING = "starting"
    """No rank was started yet: the nodes meet, or modules are imported."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A cycle has ended, and the next one hasn't begun."""
    ENDING = "ending"
    """No further cycle follows."""


class LastCause(Message, frozen=True, kw_only=True):
    """Cause of the last cycle that didn't end well."""

    cycle: Int
    text: str
    rank: Int | None
    kind: str


class JobFacts(Message, frozen=True, kw_only=True):
    """The job as seen by this node's launcher."""

    run_id: str
    launcher_pid: Int
    log_dir: str
    """Empty without logs."""
    started_ns: Int
    phase: JobPhase
    cycle: Int | None
    cycle_started_ns: Int | None
    """Start of ``cycle``, the last one that was begun; None before the first."""
    nodes: Int
    world_size: Int
    max_restarts: Int
    restarts_left: Int
    observe_only: bool
    paused_since_ns: Int | None
    last_cause: LastCause | None
    ranks: tuple[RankRow, ...]
    """Ranks of this node."""
    goodput: Finite | None = None
    """Share of productive steps so far; None if no iteration has begun."""
    hangs: tuple[ReportedHang, ...] = ()
    slow_ranks: tuple[RankLag, ...]
    """Ranks of any node that hold the others back, as far as this launcher was told: that at place 0 is."""
    now_ns: Int
    """Time of these facts."""
