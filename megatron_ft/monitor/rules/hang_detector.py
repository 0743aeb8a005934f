"""Hang detection: from what the board says and what time it is, to what the monitor does next.

Pure: no clock, no I/O. Times are nanoseconds of CLOCK_MONOTONIC.

What is timed against which timeout is in `link.base.intervals`; the rules of verdicts and of time in which the node
stood still are at the top of `megatron_ft.monitor`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ft.link.base.intervals import Interval, IntervalKey, running_intervals, smallest_timeout
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.shared import RankHung

CONFIRM_AFTER_NS = 10_000_000
"""Time from the first overdue reading to the second, which makes the verdict."""
MIN_SLEEP_NS = 5_000_000
"""Least sleep while nothing is overdue, so that absurdly small timeouts don't make a busy loop."""
_MOST_PUT_OFF = 5
"""Most times in a row that a late second reading counts as a first one again."""
_DOUBT_NS = 10_000_000_000
_DOUBT_SHARE = 4
_MAX_TOLERANCE_NS = 100_000_000
_MIN_TOLERANCE_NS = 20_000_000
_MAX_GAPS = 64


class Check(NamedTuple):
    """Outcome of one check of the board."""

    next_look_ns: int | None = None
    """Latest time of the next look; None: something else wakes the monitor."""
    verdict: RankHung | None = None
    """An interval that was overdue in two readings."""


class Gap(NamedTuple):
    """A span in which the node was stopped, or may have been.

    A merged span holds time between its stops, too: only ``lost_ns`` and ``doubtful_ns`` of it are excused.
    """

    start_ns: int
    end_ns: int
    lost_ns: int
    """Part of it that isn't counted for any rank."""
    doubtful_ns: int
    """Additional part that may have been lost."""


@dataclass
class HangDetector:
    """Detector of hangs on one board: what it remembers from one check to the next."""

    check_interval_ns: int
    """Longest time between two checks."""
    last_look_ns: int
    """Time of the last check; of that of another monitor, whose board this is now."""
    asked_ns: int | None = None
    """Latest time that was planned for the next check; None: none."""
    gaps: list[Gap] = field(default_factory=list)
    """In order, without overlap."""
    suspect: tuple[IntervalKey, int] | None = None
    """An interval seen overdue once; a second reading, not before that time (ns), makes it a verdict."""
    put_off: int = 0
    """Number of late second readings in a row, each counted as a first one."""
    dismissed: set[IntervalKey] = field(default_factory=set)
    """Overdue intervals that were reported and left alone; not checked again while they last."""
    given: dict[IntervalKey, int] = field(default_factory=dict)
    """Total timeout of intervals that were extended, in nanoseconds."""

    def check(self, board: BoardSnapshot, now_ns: int, *, was_stopped: bool = False) -> Check:
        """Check one snapshot, taken just before ``now_ns``; ``was_stopped``: a SIGCONT arrived since the last check."""
        assert now_ns >= self.last_look_ns, (now_ns, self.last_look_ns)
        smallest = smallest_timeout(board)
        self._note_gap(smallest, now_ns, was_stopped=was_stopped)
        self.last_look_ns = now_ns
        if board.closing:
            self.suspect = self.asked_ns = None
            return Check()

        running = {interval.key: interval for interval in running_intervals(board)}
        self.dismissed &= running.keys()
        self.given = {key: timeout_ns for key, timeout_ns in self.given.items() if key in running}
        bounds = [now_ns + self.check_interval_ns]
        overdue: list[tuple[bool, int, Interval]] = []
        for interval in running.values():
            if interval.key in self.dismissed:
                continue
            # a timeout armed in the meantime may be longer than the extension
            timeout_ns = max(interval.timeout_ns, self.given.get(interval.key, 0))
            deadline_ns = interval.since_ns + timeout_ns + self._stood_still(interval)
            bounds.append(deadline_ns)
            if now_ns >= deadline_ns:
                overdue.append((not interval.enforced, deadline_ns, interval))
        if overdue:
            # enforced ones first: a report takes seconds
            _, _, first = min(overdue, key=lambda each: each[:2])
            return self._judge_overdue(board, first, now_ns)
        self.suspect, self.put_off = None, 0
        if smallest is not None:
            bounds.append(now_ns + max(smallest, MIN_SLEEP_NS))
        self.asked_ns = min(bounds)
        return Check(self.asked_ns)

    def dismiss(self, verdict: RankHung) -> None:
        """Don't report this hang again: its rank isn't terminated."""
        self.dismissed.add(verdict.key)

    def extend_timeout(self, verdict: RankHung, timeout_ns: int) -> None:
        """Let the interval of a verdict last ``timeout_ns`` in all before it is overdue again."""
        self.given[verdict.key] = timeout_ns
        self.suspect = None

    def excuse(self, since_ns: int, now_ns: int) -> None:
        """Exclude the time from ``since_ns`` on, in which hang detection was suspended."""
        start_ns = max(since_ns, self.gaps[-1].end_ns if self.gaps else 0)
        _add_gap(self.gaps, Gap(start_ns, now_ns, now_ns - start_ns, 0))
        self.suspect = self.asked_ns = None
        self.last_look_ns = max(self.last_look_ns, now_ns)

    def _judge_overdue(self, board: BoardSnapshot, interval: Interval, now_ns: int) -> Check:
        if self.suspect is None or self.suspect[0] != interval.key:
            self.suspect = interval.key, now_ns + CONFIRM_AFTER_NS
        if now_ns < self.suspect[1]:
            self.asked_ns = self.suspect[1]
            return Check(self.asked_ns)
        self.asked_ns = None  # a check after this one isn't late
        verdict = RankHung(
            rank=board.rank,
            cycle=board.cycle,
            pid=board.pid,
            kind=interval.kind.value,
            section=interval.section,
            at_ns=now_ns,
            since_ns=interval.since_ns,
            elapsed_s=(now_ns - interval.since_ns - self._stood_still(interval)) / 1e9,
            timeout_s=interval.timeout_ns / 1e9,
            iteration=board.iteration,
            open_sections=tuple(s.name for s in board.open_sections),
            learned=interval.is_learned,
            enforced=interval.enforced,
        )
        return Check(verdict=verdict)

    def _note_gap(self, smallest: int | None, now_ns: int, *, was_stopped: bool) -> None:
        """Record the time since the last check as lost if the node may have been stopped in it."""
        # a busy node wakes the monitor some milliseconds late: that isn't a stop, and must not delay a verdict
        tolerance = _MAX_TOLERANCE_NS
        if smallest is not None:
            tolerance = min(max(smallest // 10, _MIN_TOLERANCE_NS), _MAX_TOLERANCE_NS)
        late_ns = 0 if self.asked_ns is None else now_ns - self.asked_ns
        passed_ns = now_ns - self.last_look_ns
        if passed_ns <= 0 or not (was_stopped or late_ns > tolerance):
            return
        lost_ns = passed_ns if was_stopped else min(late_ns, passed_ns)
        _add_gap(self.gaps, Gap(self.last_look_ns, now_ns, lost_ns, passed_ns - lost_ns))
        # between the two readings the rank must have had time to go on
        if was_stopped or self.put_off < _MOST_PUT_OFF:
            self.put_off += self.suspect is not None
            self.suspect = None

    def _stood_still(self, interval: Interval) -> int:
        """Return the part of the time since an interval began that isn't charged to it."""
        lost_ns = doubtful_ns = 0
        for gap in reversed(self.gaps):  # in order: earlier gaps are older still
            if gap.end_ns <= interval.since_ns:
                break
            span_ns = gap.end_ns - max(gap.start_ns, interval.since_ns)
            lost_of_it_ns = min(gap.lost_ns, span_ns)
            lost_ns += lost_of_it_ns
            doubtful_ns += min(gap.doubtful_ns, span_ns - lost_of_it_ns)
        # a quarter of the timeout may be doubtful, but at least 10 s, and never more than the timeout itself
        most_ns = min(interval.timeout_ns, max(_DOUBT_NS, interval.timeout_ns // _DOUBT_SHARE))
        return lost_ns + min(doubtful_ns, most_ns)


def lost_between(gaps: Sequence[Gap], start_ns: int, end_ns: int) -> int:
    """Return the part of this time that certainly isn't the rank's: pauses, or stops of the node."""
    lost_ns = 0
    for gap in reversed(gaps):  # in order: earlier gaps are older still
        if gap.end_ns <= start_ns:
            break
        lost_ns += max(0, min(gap.lost_ns, min(gap.end_ns, end_ns) - max(gap.start_ns, start_ns)))
    return lost_ns


def _add_gap(gaps: list[Gap], gap: Gap) -> None:
    gaps.append(gap)
    if len(gaps) <= _MAX_GAPS:
        return
    # merge older spans first: a merged span no longer tells when in it an interval began
    pairs = list(itertools.pairwise(gaps))
    shares = [(newer.end_ns - older.start_ns) / (gap.end_ns - older.start_ns) for older, newer in pairs]
    at = shares.index(min(shares))
    older, newer = pairs[at]
    lost_ns, doubtful_ns = older.lost_ns + newer.lost_ns, older.doubtful_ns + newer.doubtful_ns
    gaps[at : at + 2] = [Gap(older.start_ns, newer.end_ns, lost_ns, doubtful_ns)]
