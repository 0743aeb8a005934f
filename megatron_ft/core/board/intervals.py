"""What is being timed on a rank now, and against which timeout, as its board says.

Pure: no clock, no I/O. Times are nanoseconds of CLOCK_MONOTONIC.

Rules
-----
* Every open section's age is ``now - opened at``; an overdue outer section is a hang even if an inner
  one is young. Only if none is open, ``now - last transition`` counts against the out-of-section timeout.
* Heartbeat timeouts, the user's like the default ones, apply to a rank that has sent a heartbeat or has opened no
  section: they don't apply to one that opens sections and sends no heartbeat.
* A learned timeout may have a moment before it from which an interval is suspected (`core.timeouts.early`). It counts
  only where a launcher can be asked, and is the timeout that the verdict has; what was learned is beside it.
* During warm-up (see :func:`_is_warming_up`) the timeouts of "step" and out of section are at least the initial
  heartbeat timeout. If a section "warmup" is configured they aren't: its timeout is then that of "step" until more than
  the warm-up's iterations have begun.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from megatron_ft.core.board.layout import FLAG_ARE_LEARNED, BoardSnapshot, SectionView
from megatron_ft.core.timeouts.budget_rule import FIRST_INTERVALS
from megatron_ft.core.times import earliest

STEP = "step"
WARMUP = "warmup"
"""Never opened: where it is configured, its timeout is that of "step" in the iterations of the warm-up."""
_WARMUP_ITERATIONS = 5
"""Unless the rank says another number."""


class HangKind(enum.Enum):
    """Which timeout was passed."""

    SECTION = "section"
    OUT_OF_SECTION = "out_of_section"
    INITIAL_HEARTBEAT = "initial_heartbeat"
    HEARTBEAT = "heartbeat"


class Interval(NamedTuple):
    """A time that is running against a timeout."""

    kind: HangKind
    section: str | None
    since_ns: int
    timeout_ns: int
    is_learned: bool = False
    learned_ns: int | None = None
    """That one, where ``timeout_ns`` is only when the interval is suspected."""


def running_intervals(board: BoardSnapshot, *, early: bool = False) -> Iterator[Interval]:
    """Everything that is being timed now and has a finite timeout; nothing once the board is ``closing``.

    ``early``: where an interval is suspected before its timeout, with that time as its timeout.
    """
    if board.closing:
        return
    slow = next((section for section in board.sections if section.name == WARMUP), None)
    warming_up = slow is None and _is_warming_up(board)
    any_open = any_opened = False
    for section in board.sections:
        any_opened = any_opened or section.open_count > 0
        if not section.opened_at_ns:
            continue
        any_open = True
        timeout_ns = section.timeout_ns
        if section.first_timeout_ns is not None and section.open_count <= FIRST_INTERVALS:
            timeout_ns = section.first_timeout_ns
        if section.name == STEP:
            timeout_ns = _step_timeout(board, timeout_ns, slow, warming_up=warming_up)
        if timeout_ns is not None:
            suspect_ns = section.suspect_after_ns if early and timeout_ns == section.timeout_ns else None
            timeouts = _with_suspicion(timeout_ns, suspect_ns, is_learned=section.is_learned)
            yield Interval(HangKind.SECTION, section.name, section.opened_at_ns, *timeouts)
    out_of_section_ns = _longest_timeout(board) if is_blank(board) else board.out_of_section_timeout_ns
    if board.first_out_of_section_ns is not None and sum(s.open_count for s in board.sections) < FIRST_INTERVALS:
        out_of_section_ns = board.first_out_of_section_ns
    if warming_up:
        out_of_section_ns = _warm_up_timeout(board, out_of_section_ns)
    if not any_open and out_of_section_ns is not None:
        since = max(board.last_transition_ns, board.start_ns, board.warm_up_over_ns)
        is_usual = early and out_of_section_ns == board.out_of_section_timeout_ns
        suspect_ns = board.suspect_out_of_section_ns if is_usual else None
        timeouts = _with_suspicion(out_of_section_ns, suspect_ns, is_learned=board.is_out_of_section_learned)
        yield Interval(HangKind.OUT_OF_SECTION, None, since, *timeouts)

    may_have_opened = any_opened or (is_blank(board) and bool(board.sections))
    if board.heartbeats == 0:
        kind, since, timeout = HangKind.INITIAL_HEARTBEAT, board.start_ns, board.initial_heartbeat_timeout_ns
    else:
        kind, since, timeout = HangKind.HEARTBEAT, board.last_heartbeat_ns, board.heartbeat_timeout_ns
    # a heartbeat's count is written before its stamp: no stamp yet is not "since the epoch"
    if timeout is not None and since and (board.heartbeats or not may_have_opened):
        yield Interval(kind, None, since, timeout, bool(board.heartbeat_flags & FLAG_ARE_LEARNED))


def is_blank(board: BoardSnapshot) -> bool:
    """Whether a board was renewed because it was damaged, and the rank has written nothing on it yet.

    With the first thing that it writes, it gives back all that only it knows.
    """
    has_written = (
        board.last_transition_ns > board.start_ns
        or board.heartbeats > 0
        or board.iteration is not None
        or any(section.open_count for section in board.sections)
    )
    return board.epoch != 0 and not has_written


def _with_suspicion(timeout_ns: int, suspect_ns: int | None, *, is_learned: bool) -> tuple[int, bool, int | None]:
    """The last three fields of an `Interval`."""
    is_early = is_learned and suspect_ns is not None and suspect_ns < timeout_ns
    return (suspect_ns, True, timeout_ns) if is_early and suspect_ns is not None else (timeout_ns, is_learned, None)


def _longest_timeout(board: BoardSnapshot) -> int | None:
    """The longest of all, None if one is infinite: a rank may be in any section, or in none."""
    timeouts = [board.out_of_section_timeout_ns, *(section.timeout_ns for section in board.sections)]
    finite = [timeout for timeout in timeouts if timeout is not None]
    return max(finite) if len(finite) == len(timeouts) else None


def _step_timeout(
    board: BoardSnapshot, timeout_ns: int | None, slow: SectionView | None, *, warming_up: bool
) -> int | None:
    """That of a "step"; ``slow``: the section "warmup", if it is configured."""
    if warming_up:
        return _warm_up_timeout(board, timeout_ns)
    if slow is not None and 0 < board.iterations_seen <= (board.warmup_iterations or _WARMUP_ITERATIONS):
        return slow.timeout_ns
    return timeout_ns


def _warm_up_timeout(board: BoardSnapshot, timeout_ns: int | None) -> int | None:
    """The timeout while the rank warms up: at least as long as the start of a rank may take."""
    start_ns = board.initial_heartbeat_timeout_ns
    return None if timeout_ns is None or start_ns is None else max(timeout_ns, start_ns)


def _is_warming_up(board: BoardSnapshot) -> bool:
    """Whether the first iterations, which are slower (compilation, allocation), are still going on.

    They end when the iteration after the given number of them begins (an iteration is reported as it begins), or with
    the first "step". A job that has neither iterations nor a section "step" has no warm-up.
    """
    if board.warmup_iterations == 0 or board.iterations_seen > board.warmup_iterations:
        return False
    steps = [section for section in board.sections if section.name == STEP]
    if any(section.open_count for section in steps):
        return False
    return bool(steps) or board.iterations_seen > 0


def smallest_timeout(board: BoardSnapshot, *, early: bool) -> int | None:
    """The smallest finite timeout: nothing that starts after a look can be late before it is over."""
    timeouts = [s.timeout_ns for s in board.sections]
    timeouts += [
        board.out_of_section_timeout_ns,
        board.initial_heartbeat_timeout_ns,
        board.heartbeat_timeout_ns,
    ]
    if early:
        timeouts += [board.suspect_out_of_section_ns, *(s.suspect_after_ns for s in board.sections)]
    return earliest(*timeouts)
