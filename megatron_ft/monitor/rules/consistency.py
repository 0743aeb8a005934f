"""Check that one reading of a board can follow another; otherwise a stray write has damaged the board. Pure.

``layout.decode`` finds words that are impossible by themselves. A zero or a small number is possible, and could make a
healthy rank look overdue; so a count or a stamp that goes down is damage, and so is a timeout that changes alone.
"""

from __future__ import annotations

from megatron_ft.link.base.layout import BoardSnapshot

_NEVER_LOWER = (
    *("start_ns", "warmup_iterations", "iterations_seen", "heartbeats", "steps", "saves", "iterations_back"),
    *("ring_head", "timeouts_version", "first_iteration_at_ns", "first_step_at_ns", "warm_up_over_ns"),
    *("last_heartbeat_ns", "last_transition_ns"),
)


def contradiction(before: BoardSnapshot, after: BoardSnapshot) -> str | None:
    """Return why ``after`` can't be read after ``before``; None if it can."""
    for name in _NEVER_LOWER:
        old, new = getattr(before, name), getattr(after, name)
        if new < old:
            return f"{name} went from {old} to {new}"
    count = len(before.sections)
    if len(after.sections) < count:
        return f"there were {count} sections, now there are {len(after.sections)}"
    moved = before.last_transition_ns != after.last_transition_ns
    for known, section in zip(before.sections, after.sections, strict=False):
        is_closed = known.opened_at_ns and not section.opened_at_ns
        if section.name != known.name or section.open_count < known.open_count or (is_closed and not moved):
            return f"section {known.name!r} was closed, forgotten or renamed without an event"
    if before.timeouts_version == after.timeouts_version and _timeouts(before, count) != _timeouts(after, count):
        return "a timeout is another one, though the timeouts were not changed"
    return None


def _timeouts(board: BoardSnapshot, sections: int) -> list[int | None]:
    of_heartbeats = [board.own_initial_heartbeat_timeout_ns, board.own_heartbeat_timeout_ns, board.heartbeat_flags]
    of_sections = [each.own_timeout_ns for each in board.sections[:sections]]
    return [*of_heartbeats, board.own_out_of_section_timeout_ns, *of_sections]
