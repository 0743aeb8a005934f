"""Rows of `megatron-ft status`: a rank's place and the used share of its timeout, from its board and a time. Pure.

Intervals and timeouts are the monitor's own rule (``running_intervals``), so the shown and the enforced ones are the
same, with one exception: only the monitors know, and exclude, the time in which the whole node was suspended; a share
shown here may then be too high.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.diagnosis.evidence import open_sections
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.messages.job_facts import RankRow, RankState, TimeoutUse


class RankReading(NamedTuple):
    """Observation of a rank at one moment."""

    snapshot: BoardSnapshot | None = None
    damaged: bool = False
    process_state: str | None = "S"
    """Letter of /proc/<pid>/stat; None if the process has ended."""
    collectives: CollectiveCounts | None = None
    """Counts of collectives; the only facts of a rank whose script calls no hooks."""


def make_rows(ranks: Iterable[tuple[RankRow, RankReading]], pauses: Pauses, now_ns: int) -> tuple[RankRow, ...]:
    """Complete the row of each rank of this node, sorted by rank. Readings precede ``now_ns``.

    ``ranks``: rows without what a reading tells; their state is HUNG, or any other for a rank that isn't found hung.
    """
    return tuple(sorted((_row(*each, pauses, now_ns) for each in ranks), key=lambda row: row.rank))


def _row(row: RankRow, reading: RankReading, pauses: Pauses, now_ns: int) -> RankRow:
    board, state = reading.snapshot, _state(row, reading, paused=pauses.since_ns is not None)
    row = replace(row, state=state, iteration=None if board is None else board.iteration)
    if board is None or state in (RankState.EXITED, RankState.CLOSING):
        return row  # the board's sections have stood still since
    opened = any(section.open_count for section in board.sections)
    sections = open_sections(board, now_ns) or ()
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
    if reading.process_state in "Tt":
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


def _since(then_ns: int, now_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9
