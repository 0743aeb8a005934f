"""Intervals timed on a rank now, and their timeouts, according to its board.

Pure: no clock, no I/O. Times are nanoseconds of CLOCK_MONOTONIC.

Rules
-----

* Every open section's age is ``now - opened at``; an overdue outer section is a hang even if an inner one is young.
  Only if none is open, ``now - last transition`` counts against the out-of-section timeout.
* Heartbeat timeouts, the user's like the default ones, apply to a rank that has sent a heartbeat or has opened no
  section; not to one that opens sections and sends no heartbeat.
* An armed timeout (learned, written by the monitor) replaces the rank's own one. An interval that exceeds one that
  isn't enforced is only reported.
* From the end of "setup" until the first step is over, the timeout out of section is at least that of "setup":
  other ranks may still be in theirs.
* During warm-up (see :func:`_is_warming_up`) the timeouts of "step" and out of section are at least the initial
  heartbeat timeout. If a section "warmup" is configured they aren't: its timeout is then that of "step" until more
  than the warm-up's iterations have begun.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_ft.link.base.layout import FLAG_ARE_LEARNED, ArmedTimeout, BoardSnapshot, SectionView
from megatron_ft.link.base.times import earliest

FIRST_INTERVALS = 4
"""Number of first times out of section in a cycle that reports leave out: the warm-up may have another timeout."""
SETUP, STEP, CHECKPOINTING = SECTIONS = ("setup", "step", "checkpointing")
"""Names of the sections that train loops usually have."""
WARMUP = "warmup"
"""Section that is never opened: if configured, its timeout is that of "step" in the warm-up's iterations."""
WARMUP_ITERATIONS = 5
"""Default of the rank's number of warm-up iterations, also in nvidia-resiliency-ext."""


class HangKind(enum.Enum):
    """Kind of timeout that was exceeded."""

    SECTION = "section"
    OUT_OF_SECTION = "out_of_section"
    INITIAL_HEARTBEAT = "initial_heartbeat"
    HEARTBEAT = "heartbeat"


IntervalKey = tuple[str, str | None, int]
"""Kind, section and start: the identity of an interval, independent of its timeout."""


class Interval(NamedTuple):
    """A time that runs against a timeout."""

    kind: HangKind
    section: str | None
    since_ns: int
    timeout_ns: int
    is_learned: bool = False
    """True if the timeout was armed, or calculated by the rank's client."""
    enforced: bool = True
    """False: an overdue interval is only reported, its rank never terminated."""

    @property
    def key(self) -> IntervalKey:
        return self.kind.value, self.section, self.since_ns


class _Bound(NamedTuple):
    """Last fields of an `Interval`; ``timeout_ns`` None: there is no timeout."""

    timeout_ns: int | None
    is_learned: bool = False
    enforced: bool = True


def running_intervals(board: BoardSnapshot) -> Iterator[Interval]:
    """Yield every interval with a finite timeout; none once the board is ``closing``."""
    if board.closing:
        return
    sections = {section.name: section for section in board.sections}
    slow, opened = sections.get(WARMUP), [section for section in board.sections if section.opened_at_ns]
    warming_up = slow is None and _is_warming_up(board)
    for section in opened:
        bound = _section_bound(section)
        if section.name == STEP and warming_up:
            bound = _warm_up_bound(board, bound)
        elif (
            section.name == STEP
            and slow
            and 0 < board.iterations_seen <= (board.warmup_iterations or WARMUP_ITERATIONS)
        ):
            bound = _section_bound(slow)
        if bound.timeout_ns is not None:
            yield Interval(HangKind.SECTION, section.name, section.opened_at_ns, bound.timeout_ns, *bound[1:])
    if not opened:
        own_ns, is_calculated = board.own_out_of_section_timeout_ns, board.is_out_of_section_calculated
        bound = _bound(board.armed_out_of_section, own_ns, is_calculated=is_calculated)
        bound = _warm_up_bound(board, bound) if warming_up else _first_step_bound(board, bound, sections)
        if bound.timeout_ns is not None:
            since = max(board.last_transition_ns, board.start_ns, board.warm_up_over_ns)
            yield Interval(HangKind.OUT_OF_SECTION, None, since, bound.timeout_ns, *bound[1:])

    if board.heartbeats == 0:
        kind, since, timeout = HangKind.INITIAL_HEARTBEAT, board.start_ns, board.initial_heartbeat_timeout_ns
    else:
        kind, since, timeout = HangKind.HEARTBEAT, board.last_heartbeat_ns, board.heartbeat_timeout_ns
    # a heartbeat's count is written before its stamp: a missing stamp is not "since the epoch"
    if timeout is not None and since and (board.heartbeats or not any(each.open_count for each in board.sections)):
        yield Interval(kind, None, since, timeout, bool(board.heartbeat_flags & FLAG_ARE_LEARNED))


def _section_bound(section: SectionView) -> _Bound:
    return _bound(section.armed, section.own_timeout_ns, is_calculated=section.is_calculated)


def _bound(armed: ArmedTimeout | None, own_ns: int | None, *, is_calculated: bool) -> _Bound:
    if armed is None:
        return _Bound(own_ns, is_calculated)
    return _Bound(armed.timeout_ns, is_learned=True, enforced=armed.enforced)


def _first_step_bound(board: BoardSnapshot, bound: _Bound, sections: Mapping[str, SectionView]) -> _Bound:
    """Return at least the timeout of "setup" until the first step is over: other ranks may still be in theirs.

    "setup" is no collective. A rank whose setup is quick waits for the others in its first step, which is out of
    section.
    """
    setup, step = sections.get(SETUP), sections.get(STEP)
    is_first = not board.first_step_at_ns and (step is None or not step.open_count)
    if bound.timeout_ns is None or not is_first or setup is None or not setup.open_count:
        return bound
    of_setup = _section_bound(setup)
    return of_setup if of_setup.timeout_ns is not None and of_setup.timeout_ns > bound.timeout_ns else bound


def _warm_up_bound(board: BoardSnapshot, bound: _Bound) -> _Bound:
    """Return the bound during warm-up: at least as long as the start of a rank may take."""
    start_ns = board.initial_heartbeat_timeout_ns
    if bound.timeout_ns is None or start_ns is None:
        return _Bound(None)
    return bound._replace(timeout_ns=max(bound.timeout_ns, start_ns))


def _is_warming_up(board: BoardSnapshot) -> bool:
    """Return True while the first, slower iterations (compilation, allocation) go on.

    The warm-up ends when the iteration after the given number begins, or with the first "step". A job with neither
    iterations nor a section "step" has no warm-up.
    """
    if board.warmup_iterations == 0 or board.iterations_seen > board.warmup_iterations:
        return False
    steps = [section for section in board.sections if section.name == STEP]
    if any(section.open_count for section in steps):
        return False
    return bool(steps) or board.iterations_seen > 0


def smallest_timeout(board: BoardSnapshot) -> int | None:
    """Return the smallest finite timeout: nothing that starts after a look can be late before that time."""
    return earliest(
        board.out_of_section_timeout_ns,
        board.initial_heartbeat_timeout_ns,
        board.heartbeat_timeout_ns,
        *(section.timeout_ns for section in board.sections),
    )
