"""What a progress board tells, as the evidence has it. Pure."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.board.hang_detector import Overdue
from megatron_ft.core.board.intervals import running_intervals
from megatron_ft.core.board.layout import BoardSnapshot

__all__ = ["for_note", "of_snapshot", "of_verdict"]


def for_note(snapshot: BoardSnapshot | None, now_ns: int) -> dict[str, Any]:
    """The fields of a ``RankSnapshot`` that the board tells."""
    if snapshot is None:
        return {}
    outermost = snapshot.open_sections[0] if snapshot.open_sections else None
    since_ns = snapshot.last_transition_ns if outermost is None else outermost.opened_at_ns
    timeout_ns = snapshot.out_of_section_timeout_ns if outermost is None else outermost.timeout_ns
    moved_ns, collective_s = snapshot.last_transition_ns, None
    if snapshot.collectives is not None and snapshot.watch_only:
        moved_ns = since_ns = snapshot.collectives.moved_ns
        collective_s = round((now_ns - moved_ns) / 1e9, 3)
    due_ns = min((each.since_ns + each.timeout_ns for each in running_intervals(snapshot)), default=None)
    return {
        "iteration": snapshot.iteration,
        "section": None if outermost is None else outermost.name,
        "timeout_s": None if timeout_ns is None else timeout_ns / 1e9,
        "open_s": round((now_ns - since_ns) / 1e9, 3),
        "quiet_s": round((now_ns - moved_ns) / 1e9, 3),
        "left_s": None if due_ns is None else round((due_ns - now_ns) / 1e9, 3),
        "closing": snapshot.closing,
        "collective_s": collective_s,
    }


def of_verdict(verdict: Overdue) -> dict[str, Any]:
    """The verdict in seconds."""
    return {
        "kind": verdict.kind.value,
        "section": verdict.section,
        "elapsed_s": verdict.elapsed_ns / 1e9,
        "timeout_s": verdict.timeout_ns / 1e9,
        "since_ns": verdict.since_ns,
    }


def of_snapshot(snapshot: BoardSnapshot | None, at_ns: int) -> dict[str, Any]:
    """The board in seconds before ``at_ns``; empty where it couldn't be read."""
    if snapshot is None:
        return {}
    return {
        "iteration": snapshot.iteration,
        "iterations_seen": snapshot.iterations_seen,
        "heartbeats": snapshot.heartbeats,
        "quiet_s": (at_ns - snapshot.last_transition_ns) / 1e9,
        "open_sections": [
            {
                "name": section.name,
                "open_for_s": (at_ns - section.opened_at_ns) / 1e9,
                "timeout_s": None if section.timeout_ns is None else section.timeout_ns / 1e9,
            }
            for section in snapshot.open_sections
        ],
    }
