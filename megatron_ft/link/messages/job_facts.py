"""A launcher's facts about its job on this node, as shown by `megatron-ft status`. Pure.

Each rank's place and used share of its timeout come from its board, the launcher's facts, and a time. Intervals and
timeouts are the monitor's own rule (``running_intervals``), so the shown and the enforced ones are the same, with one
exception: only the monitors know, and exclude, the time in which the whole node was suspended; a share shown here may
then be too high.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.diagnosis.waits import RankLag
from megatron_ft.link.base.codec import Fact, Finite, Int, Message
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts, SectionView
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.facts.reported_hang import ReportedHang

_STOPPED = frozenset("Tt")


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


class RankReading(NamedTuple):
    """Observation of a rank at one moment."""

    snapshot: BoardSnapshot | None = None
    damaged: bool = False
    process_state: str | None = "S"
    """Letter of /proc/<pid>/stat; None if the process has ended."""
    collectives: CollectiveCounts | None = None
    """Counts of collectives; the only facts of a rank whose script calls no hooks."""


class OpenSection(Fact, frozen=True):
    """An open section, in seconds; None is no timeout."""

    name: str
    open_s: Finite
    timeout_s: Finite | None


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


def make_rows(ranks: Iterable[tuple[RankRow, RankReading]], pauses: Pauses, now_ns: int) -> tuple[RankRow, ...]:
    """Complete the row of each rank of this node, sorted by rank. Readings precede ``now_ns``.

    ``ranks``: rows without what a reading tells; their state is HUNG, or any other for a rank that isn't found hung.
    """
    return tuple(sorted((_row(*each, pauses, now_ns) for each in ranks), key=lambda row: row.rank))


def most_urgent(rows: Sequence[RankRow], count: int) -> list[RankRow]:
    """Return the ``count`` most important rows in their old order: trouble, then the most used timeout."""
    if count >= len(rows):
        return list(rows)
    chosen = sorted(range(len(rows)), key=lambda at: _calm(rows[at]))[:count]
    return [rows[at] for at in sorted(chosen)]


def _calm(row: RankRow) -> tuple[int, float]:
    in_trouble = row.state in (RankState.EXITED, RankState.HUNG, RankState.DAMAGED, RankState.STOPPED)
    return (0 if in_trouble else 1, -row.timeout.share if row.timeout is not None else 0.0)


def _row(row: RankRow, reading: RankReading, pauses: Pauses, now_ns: int) -> RankRow:
    board, state = reading.snapshot, _state(row, reading, paused=pauses.since_ns is not None)
    row = replace(row, state=state, iteration=None if board is None else board.iteration)
    if board is None or state in (RankState.EXITED, RankState.CLOSING):
        return row  # the board's sections have stood still since
    opened = any(section.open_count for section in board.sections)
    sections = tuple(_open(section, now_ns) for section in board.open_sections)
    return replace(
        row,
        sections=sections,
        out_of_section_s=_since(board.last_transition_ns, now_ns) if opened and not sections else None,
        heartbeat_s=_since(board.last_heartbeat_ns, now_ns) if board.last_heartbeat_ns else None,
        timeout=max(_uses(board, pauses, now_ns), key=lambda use: use.share, default=None),
    )


def _state(row: RankRow, reading: RankReading, *, paused: bool) -> RankState:
    if row.exit_code is not None or reading.process_state is None:
        return RankState.EXITED
    if row.state is RankState.HUNG:
        return RankState.HUNG
    if reading.damaged:
        return RankState.DAMAGED
    if reading.process_state in _STOPPED:
        return RankState.STOPPED
    if reading.snapshot is None:
        return RankState.NOT_ATTACHED
    if reading.snapshot.closing:
        return RankState.CLOSING
    return RankState.PAUSED if paused else RankState.RUNNING


def _uses(board: BoardSnapshot, pauses: Pauses, now_ns: int) -> Iterable[TimeoutUse]:
    for interval in running_intervals(board):
        used_ns = now_ns - interval.since_ns - pauses.within(interval.since_ns, now_ns)
        yield TimeoutUse(interval.kind.value, interval.section, max(0, used_ns) / 1e9, interval.timeout_ns / 1e9)


def _open(section: SectionView, now_ns: int) -> OpenSection:
    timeout_s = None if section.timeout_ns is None else section.timeout_ns / 1e9
    return OpenSection(section.name, _since(section.opened_at_ns, now_ns), timeout_s)


def _since(then_ns: int, now_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9
