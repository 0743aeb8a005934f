"""Intervals of one board, counted by its rank's monitor.

Pure: no clock, no I/O. Times are nanoseconds of CLOCK_MONOTONIC. Only intervals count whose start is known. The time
out of section lies between the last close and the next open, as hang detection times it, the first one from the start
of the monitoring; one that is open when the run ends has ended then. Time in which hang detection was suspended, or
the node was stopped, is in no interval.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Intervals, Observed
from megatron_ft.link.base import layout
from megatron_ft.link.base.intervals import FIRST_INTERVALS, SETUP
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.minutes import HEARTBEAT, MINUTE_NS, OUT_OF_SECTION, RankMinute, SectionMinute
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.monitor.rules.hang_detector import Gap, lost_between

_IDLE, _HEARTBEATS = -1, -2
"""Indices of the time out of section and of heartbeats among those of sections."""
_FIRST_STEPS = 32


class BoardIntervals:
    """The intervals of one cycle, and those since the last minute."""

    def __init__(self, board: BoardSnapshot, *, from_ring_head: int = 0) -> None:
        """Begin with event number ``from_ring_head``: 0 for a fresh board, else that board's head."""
        self.read_to = from_ring_head
        """Number of the first event that wasn't fed yet."""
        self._start_ns = board.start_ns
        self._ended: dict[int, tuple[int, int]] = {}
        """Number of the intervals that have ended, and the longest, by index."""
        self._since = _open_on(board) if from_ring_head else {}
        """Beginning of each interval that goes on, by index; 0 or nothing: unknown. Out of section while none is open.
        """
        if not self._since:
            self._since[_IDLE] = board.last_transition_ns or board.start_ns
        self._lost = 0
        self._minute: dict[int, SectionMinute] = {}
        self._iterations: list[tuple[int, int]] = []
        """Number and beginning of the first and the last iteration of the minute."""
        self._has_ended = False
        self.minute_from_ns = board.last_transition_ns if from_ring_head else board.start_ns

    def feed(
        self, first: int, words: Sequence[int], board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap] = ()
    ) -> None:
        """Count what has happened since the last time.

        Args:
            first: number of the first event in ``words``; more than ``read_to`` says that events were lost.
            words: two for each event up to the head of ``board``.
            board: a snapshot; it was taken before ``now_ns``.
            gaps: times that are the rank's not at all, or not in full.
        """
        if first > self.read_to:
            # the starts of sections that end in these events aren't known, but for those that have been open since
            self._lost += first - self.read_to
            first_kinds: dict[int, int] = {}
            for _, kind, index, _ in layout.ring_events(words):
                first_kinds.setdefault(index, kind)
            self._since = {index: 0 for index, kind in first_kinds.items() if kind == layout.EVENT_END}
            self._since |= {index: since for index, since in _open_on(board).items() if index not in first_kinds}
        self.read_to = first + len(words) // 2
        for at, kind, index, value in layout.ring_events(words):
            self._take_event(at, kind, index, value, now_ns, gaps)
        if self.read_to == board.ring_head and not _open_on(board):
            # the board is right: a signal handler may have closed a section, or a calculation restarted the clock
            idle_since = board.last_transition_ns or self._start_ns
            self._since = {_IDLE: idle_since, _HEARTBEATS: self._since.get(_HEARTBEATS, 0)}
        if not self._has_ended and (board.closing or board.learning_facts & layout.FACT_RUN_ENDS):
            self._has_ended = True
            self._add(_IDLE, now_ns, gaps)

    def _take_event(self, at: int, kind: int, index: int, value: int, now_ns: int, gaps: Sequence[Gap]) -> None:
        if not self._start_ns <= at <= now_ns:
            self._since.clear()  # a stray write: which event it was isn't known
        elif kind == layout.EVENT_START:
            self._add(_IDLE, at, gaps)
            self._since[index] = at
        elif kind == layout.EVENT_END:
            self._add(index, at, gaps)
            if all(other < 0 for other in self._since):
                self._since[_IDLE] = at
        elif kind == layout.EVENT_ITERATION:
            self._iterations[1:] = [(value, at)]
        elif kind == layout.EVENT_HEARTBEAT:
            self._add(_HEARTBEATS, at, gaps)
            self._since[_HEARTBEATS] = at

    def _add(self, index: int, at_ns: int, gaps: Sequence[Gap]) -> None:
        """Count an interval that has ended, if its beginning is known."""
        if not (since_ns := self._since.pop(index, 0)):
            return
        length_ns = _length_ns(since_ns, at_ns, gaps)
        count, longest_ns = self._ended.get(index, (0, 0))
        self._ended[index] = count + 1, max(longest_ns, length_ns)
        is_first = index == _IDLE and count < FIRST_INTERVALS
        depth = sum(other >= 0 for other in self._since)
        minute = self._minute.setdefault(index, SectionMinute())
        minute.add(self._in_minute_s(since_ns), length_ns / 1e9, depth=depth, is_first=is_first)

    def observed(self, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap] = ()) -> Intervals:
        """Return the intervals of this cycle so far; open ones count with their age."""
        is_in_setup = any(each.name == SETUP and each.opened_at_ns for each in board.sections)
        facts = FACT_SAVED * (board.saves > 0) | FACT_SETUP_OPEN * is_in_setup
        open_ns = self._open_ns(board, now_ns, gaps)
        seen = {}
        for index, name in _named(board).items():
            count, longest_ns = self._ended.get(index, (0, 0))
            seen[name] = Observed(count, max(longest_ns, open_ns.get(index, 0)) / 1e9, board.rank)
        ended = bool(board.learning_facts & layout.FACT_RUN_ENDS)
        return Intervals(board.cycle, reached_by(board), ended, board.learning_facts | facts, seen)

    def take_minute(self, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap] = ()) -> Minute:
        """Return what was counted since the last minute was taken, up to ``now_ns``, and begin a new minute."""
        for index, open_ns in self._open_ns(board, now_ns, gaps).items():
            if index != _IDLE:
                self._minute.setdefault(index, SectionMinute()).open_s = round(open_ns / 1e9, 4)
        names = {**_named(board), _HEARTBEATS: HEARTBEAT}
        row = RankMinute(
            rank=board.rank,
            from_s=self._in_minute_s(self.minute_from_ns),
            to_s=self._in_minute_s(now_ns),
            lost=self._lost,
            iterations=tuple((number, self._in_minute_s(at_ns)) for number, at_ns in self._iterations),
            sections={name: self._minute[index] for index, name in names.items() if index in self._minute},
        )
        minute = Minute(cycle=board.cycle, at_ns=self.minute_from_ns // MINUTE_NS * MINUTE_NS, ranks=(row,))
        self._minute, self._iterations, self._lost, self.minute_from_ns = {}, [], 0, now_ns
        return minute

    def _in_minute_s(self, at_ns: int) -> float:
        """Return seconds from the zero of this minute's record."""
        return round((at_ns - self.minute_from_ns // MINUTE_NS * MINUTE_NS) / 1e9, 4)

    def _open_ns(self, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap]) -> dict[int, int]:
        """Return the ages of the intervals that are open, by index."""
        if board.closing or self._has_ended:
            return {}
        since_ns = {**_open_on(board), _IDLE: self._since.get(_IDLE, 0)}
        return {index: _length_ns(since, now_ns, gaps) for index, since in since_ns.items() if since > 0}


def reached_by(board: BoardSnapshot) -> tuple[int, int]:
    """Return the milestones of a rank: the number of its saves, and the last of 32, 64, 128, ... steps that it took."""
    steps = max(board.steps, board.iterations_seen)  # a loop without hooks counts no steps
    return board.saves, 1 << (steps.bit_length() - 1) if steps >= _FIRST_STEPS else 0


def _length_ns(since_ns: int, at_ns: int, gaps: Sequence[Gap]) -> int:
    return max(0, at_ns - since_ns - lost_between(gaps, since_ns, at_ns))


def _named(board: BoardSnapshot) -> dict[int, str]:
    """Return the names of the sections and of the time in none, by index."""
    return {**{index: each.name for index, each in enumerate(board.sections)}, _IDLE: OUT_OF_SECTION}


def _open_on(board: BoardSnapshot) -> dict[int, int]:
    return {index: each.opened_at_ns for index, each in enumerate(board.sections) if each.opened_at_ns}
