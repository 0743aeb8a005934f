"""A rank's section events, from the ring on its board into the event log, in batches.

The ring is read with each check of the board; a rank that is faster loses its oldest events, and the batch
says how many. What was written last stands on the board, so that a monitor that replaces another one goes on there.
"""

from __future__ import annotations

from megatron_ft.core.board import layout as layout
from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.records.monitor import Progress
from megatron_ft.ipc.board import Board, RingEvent

__all__ = ["next_batch", "taken"]

_ENOUGH = 1024
_KINDS = (layout.EVENT_START, layout.EVENT_END, layout.EVENT_HEARTBEAT, layout.EVENT_ITERATION)
EVERY_NS = 30_000_000_000
"""A batch is written when it has many events, or its first one is this old."""


def next_batch(board: Board, snapshot: BoardSnapshot, now_ns: int, *, at_once: bool = False) -> Progress | None:
    """What is to be written now; None if it isn't time yet.

    The caller writes it, then notes on the board how far it goes (``taken``): one that dies in between repeats it.
    """
    first, head = board.words[layout.W_LOGGED_HEAD], snapshot.ring_head
    if head <= first or not (at_once or head - first >= _ENOUGH or _age_ns(board, first, now_ns) >= EVERY_NS):
        return None
    begin = max(first, head - layout.RING_EVENTS)
    read = list(board.events(begin, head))
    # what the rank has overwritten while we read is no event any more
    oldest = board.words[layout.W_RING_HEAD] - layout.RING_EVENTS
    events = [
        event for number, event in enumerate(read, begin) if number >= oldest and _is_sane(event, snapshot, now_ns)
    ]
    from_ns = events[0].at_ns if events else now_ns
    at_us = [(event.at_ns - from_ns) // 1000 for event in events]
    return Progress(
        rank=snapshot.rank,
        cycle=snapshot.cycle,
        names=tuple(section.name for section in snapshot.sections),
        from_ns=from_ns,
        dt_us=[later - earlier for earlier, later in zip([0, *at_us], at_us, strict=False)],
        code=[event.kind << 8 | event.section_index for event in events],
        iterations=[event.value for event in events if event.kind == layout.EVENT_ITERATION],
        lost=head - first - len(events),
    )


def taken(board: Board, snapshot: BoardSnapshot) -> None:
    """What this snapshot knows is in the event log."""
    board.words[layout.W_LOGGED_HEAD] = snapshot.ring_head


def _age_ns(board: Board, number: int, now_ns: int) -> int:
    """How old the event with this number is, as far as it is still there."""
    at = layout.RING + 2 * (number & layout.RING_MASK)
    return now_ns - board.words[at]


def _is_sane(event: RingEvent, snapshot: BoardSnapshot, now_ns: int) -> bool:
    return event.kind in _KINDS and snapshot.start_ns <= event.at_ns <= now_ns
