"""Check that one reading of a board can follow another; otherwise a stray write has damaged the board. Pure.

``layout.decode`` finds words that are impossible by themselves. These functions find what the writer never does: count
back, change its rank or pid, or change a timeout without the timeouts' version. Armed timeouts are the monitor's own
words: it compares them with what it has armed, and repairs them.
"""

from __future__ import annotations

from megatron_ft.core.board.layout import BoardSnapshot, SectionView

_FIXED = ("cycle", "rank", "pid", "start_ns", "warmup_iterations", "epoch")
_COUNTS = ("iterations_seen", "heartbeats", "ring_head", "timeouts_version", "steps", "saves", "iterations_back")
_STAMPS = (
    "last_heartbeat_ns",
    "last_transition_ns",
    "first_iteration_at_ns",
    "first_step_at_ns",
    "warm_up_over_ns",
)
_TIMEOUTS = (
    "own_initial_heartbeat_timeout_ns",
    "own_heartbeat_timeout_ns",
    "heartbeat_flags",
    "own_out_of_section_timeout_ns",
    "is_out_of_section_calculated",
)
_SECTION_TIMEOUTS = ("own_timeout_ns", "is_calculated")
_MOST_MORE = 2**40
"""Most that a rank counts between two checks, or in its life: after a renewal, the ring continues."""
_LATE_NS = 1_000_000_000
"""Longest time from taking a stamp to storing it: nanoseconds, unless the process waits for a CPU in between."""


def contradiction(before: BoardSnapshot, after: BoardSnapshot, looked_ns: int) -> str | None:
    """Return why ``after`` can't be read after ``before``, read at ``looked_ns``; None if it can."""
    for names, least, most in ((_FIXED, 0, 0), (_COUNTS, 0, _MOST_MORE), (_STAMPS, 0, None)):
        for name in names:
            old, new = getattr(before, name), getattr(after, name)
            if new - old < least or (most is not None and new - old > most):
                return f"{name} went from {old} to {new}"
    if before.closing and not after.closing:
        return "the end of the monitoring was taken back"
    same_timeouts = before.timeouts_version == after.timeouts_version
    for name in _TIMEOUTS if same_timeouts else ():
        if getattr(before, name) != getattr(after, name):
            return f"{name} is {getattr(after, name)}, though the timeouts were not changed"
    if len(after.sections) < len(before.sections):
        return f"there were {len(before.sections)} sections, now there are {len(after.sections)}"
    moved = before.last_transition_ns != after.last_transition_ns
    for known, section in zip(before.sections, after.sections, strict=False):
        why = _section(known, section, after.start_ns, looked_ns, same_timeouts=same_timeouts)
        if known.opened_at_ns and not section.opened_at_ns and not moved:
            why = why or "it is closed without having been closed"
        if why is not None:
            return f"section {known.name!r}: {why}"
    return None


def _section(old: SectionView, new: SectionView, start_ns: int, looked_ns: int, *, same_timeouts: bool) -> str | None:
    if old.name != new.name:
        return f"it is called {new.name!r} now"
    if not 0 <= new.open_count - old.open_count <= _MOST_MORE:
        return f"its count went from {old.open_count} to {new.open_count}"
    for name in _SECTION_TIMEOUTS if same_timeouts else ():
        if getattr(old, name) != getattr(new, name):
            return f"its {name} is {getattr(new, name)}, though the timeouts were not changed"
    # the start: a rank stamps so what was open before its board was renewed
    since_known = (0, old.opened_at_ns, start_ns)
    if new.opened_at_ns not in since_known and new.opened_at_ns < looked_ns - _LATE_NS:
        return f"it is open since {new.opened_at_ns}, and wasn't at {looked_ns}"
    return None
