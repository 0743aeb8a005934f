"""What a progress board tells, as the evidence has it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ft.core.board.intervals import running_intervals
from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot

__all__ = ["BoardFacts", "OpenSection", "board_facts", "with_board"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSection:
    """A section that was open; seconds. ``timeout_s`` None: it has none."""

    name: str
    open_for_s: float
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardFacts:
    """A board at one moment. ``quiet_s``: seconds since the last section event."""

    iteration: int | None
    iterations_seen: int
    heartbeats: int
    quiet_s: float
    open_sections: tuple[OpenSection, ...]
    """The outermost first."""


def with_board(note: RankSnapshot, snapshot: BoardSnapshot | None, now_ns: int) -> RankSnapshot:
    """The note, with what the board tells; as it is where that couldn't be read."""
    if snapshot is None:
        return note
    outermost = snapshot.open_sections[0] if snapshot.open_sections else None
    since_ns = snapshot.last_transition_ns if outermost is None else outermost.opened_at_ns
    timeout_ns = snapshot.out_of_section_timeout_ns if outermost is None else outermost.timeout_ns
    moved_ns, collective_s = snapshot.last_transition_ns, None
    if snapshot.collectives is not None and snapshot.watch_only:
        moved_ns = since_ns = snapshot.collectives.moved_ns
        collective_s = round((now_ns - moved_ns) / 1e9, 3)
    due_ns = min((each.since_ns + each.timeout_ns for each in running_intervals(snapshot)), default=None)
    return replace(
        note,
        iteration=snapshot.iteration,
        section=None if outermost is None else outermost.name,
        timeout_s=None if timeout_ns is None else timeout_ns / 1e9,
        open_s=round((now_ns - since_ns) / 1e9, 3),
        quiet_s=round((now_ns - moved_ns) / 1e9, 3),
        left_s=None if due_ns is None else round((due_ns - now_ns) / 1e9, 3),
        closing=snapshot.closing,
        collective_s=collective_s,
    )


def board_facts(snapshot: BoardSnapshot | None, at_ns: int) -> BoardFacts | None:
    """The board in seconds before ``at_ns``; None where it couldn't be read."""
    if snapshot is None:
        return None
    return BoardFacts(
        iteration=snapshot.iteration,
        iterations_seen=snapshot.iterations_seen,
        heartbeats=snapshot.heartbeats,
        quiet_s=(at_ns - snapshot.last_transition_ns) / 1e9,
        open_sections=tuple(
            OpenSection(
                name=section.name,
                open_for_s=(at_ns - section.opened_at_ns) / 1e9,
                timeout_s=None if section.timeout_ns is None else section.timeout_ns / 1e9,
            )
            for section in snapshot.open_sections
        ),
    )
