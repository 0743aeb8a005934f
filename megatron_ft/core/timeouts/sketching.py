"""Sketches of the intervals that one board shows, kept by its rank's monitor, and the milestones of its rank.

Pure: no clock, no I/O. Times are nanoseconds of CLOCK_MONOTONIC.

Rules
-----
* Only intervals count whose start is known: from an event, or from the board's word of a section that is open.
* The time out of section lies between the last close and the next open, as hang detection times it. The first one of a
  cycle begins with the monitoring.
* Time in which hang detection was suspended, or the node was stopped, is in no interval.
* The first `FIRST_INTERVALS` intervals of a section count as ``first_s``, those that were extended because ranks made
  progress as ``explained_s``, and both are in no tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.core.board import layout
from megatron_ft.core.board.hang_detector import Gap, lost_between
from megatron_ft.core.board.intervals import FIRST_INTERVALS, SETUP, HangKind, IntervalKey
from megatron_ft.core.board.layout import (
    EVENT_END,
    EVENT_ITERATION,
    EVENT_START,
    KIND_SHIFT,
    SECTION_SHIFT,
    BoardSnapshot,
)
from megatron_ft.core.facts.monitor import Minute
from megatron_ft.core.timeouts.exchange import Facts, Milestone, Moment
from megatron_ft.core.timeouts.minutes import (
    HEARTBEAT,
    MINUTE_NS,
    MOST_SPANS,
    OUT_OF_SECTION,
    RankMinute,
    SectionMinute,
    write_row,
)
from megatron_ft.core.timeouts.sketch import MOST_BUCKETS, MOST_LOGGED, NO_INTERVAL, Sketch, bounded
from megatron_ft.core.timeouts.tail import bucket_of

_IDLE = -1
"""Index of the time out of section among those of sections."""
_HEARTBEATS = -2
_OTHERS = ((_IDLE, OUT_OF_SECTION), (_HEARTBEATS, HEARTBEAT))
_OTHER_KINDS = frozenset((layout.EVENT_HEARTBEAT, EVENT_ITERATION))
_FIRST_STEPS, _DOUBLED_FROM = 10, 32


class _Kept:
    """Summary of the intervals of one section."""

    __slots__ = ("counts", "ended", "explained_ns", "explained_since_ns", "first_ns", "longest_ns")

    def __init__(self, ended: int = 0) -> None:
        self.ended = ended
        self.longest_ns = self.first_ns = self.explained_ns = -1
        self.counts: dict[int, float] = {}
        self.explained_since_ns = 0
        """Start of an interval that was extended because ranks made progress; 0: none was."""

    def add(self, length_ns: int, *, is_first: bool, is_explained: bool) -> None:
        """Count an interval whose start is known."""
        if length_ns > self.longest_ns:
            self.longest_ns = length_ns
        if is_explained and length_ns > self.explained_ns:
            self.explained_ns = length_ns
        if is_first:
            if length_ns > self.first_ns:
                self.first_ns = length_ns
        elif not is_explained:
            bucket = bucket_of(length_ns / 1e9)
            self.counts[bucket] = self.counts.get(bucket, 0.0) + 1.0

    def sketch(self, rank: int, open_ns: int | None, most: int = MOST_BUCKETS) -> Sketch:
        return Sketch(
            ended=min(max(self.ended, 0), layout.MOST_COUNT),
            longest_s=_seconds(self.longest_ns),
            rank=rank,
            first_s=_seconds(self.first_ns),
            explained_s=_seconds(self.explained_ns),
            open_s=NO_INTERVAL if open_ns is None else open_ns / 1e9,
            tail=bounded(self.counts, most),
        )


class _KeptOfMinute(_Kept):
    """Those since the last minute's end."""

    __slots__ = ("depth", "spans", "total_ns")

    def __init__(self) -> None:
        super().__init__()
        self.total_ns = self.depth = 0
        self.spans: list[tuple[int, int]] = []
        """Start and length; of the first few."""


class _Doubt(NamedTuple):
    """A section for which the events and the board's word disagree; if they do so twice, the word is right."""

    by_events_ns: int
    by_board_ns: int


class SectionSketches:
    """Sketches of one board's sections, and of the time out of section."""

    def __init__(self, board: BoardSnapshot, *, from_ring_head: int = 0) -> None:
        """Begin with event number ``from_ring_head``: 0 for a fresh board, else that board's head."""
        self.read_to = from_ring_head
        """Number of the first event that wasn't fed yet."""
        self._start_ns = board.start_ns
        self._kept: dict[int, _Kept] = {_IDLE: _Kept()}
        self._open: dict[int, int] = {}
        """Index of each open section -> since when; 0: unknown."""
        self._idle_since = board.start_ns
        """0: unknown, or a section is open."""
        self._opened = 0
        self._doubts: dict[int, _Doubt] = {}
        self._minute: dict[int, _KeptOfMinute] = {}
        self._iterations: list[tuple[int, int]] = []
        """Number and beginning of the first and the last iteration of the minute."""
        self._heartbeat_ns = 0
        self._lost = 0
        self.minute_from_ns = board.last_transition_ns if from_ring_head else board.start_ns
        if from_ring_head:
            self._opened = sum(each.open_count for each in board.sections)
            for index, each in enumerate(board.sections):
                self._kept[index] = _Kept(each.open_count - (each.opened_at_ns > 0))
            self._kept[_IDLE].ended = self._opened
            self._open = _open_by_board(board)
            self._idle_since = 0 if self._open else board.last_transition_ns

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
            self._lost += first - self.read_to
            self._skip_lost(words, board)
        self.read_to = first + len(words) // 2
        self._count(words, now_ns, gaps)
        self._compare(board)

    def explain(self, key: IntervalKey, board: BoardSnapshot) -> None:
        """Note that an interval was extended because ranks made progress."""
        if key.kind is HangKind.OUT_OF_SECTION:
            self._kept[_IDLE].explained_since_ns = key.since_ns
        for index, each in enumerate(board.sections):
            if each.name == key.section:
                self._of(index).explained_since_ns = key.since_ns

    def sketches(self, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap] = ()) -> dict[str, Sketch]:
        """Return what was counted so far, by section and "out_of_section"; ages are those at ``now_ns``."""

        of_sections = {
            each.name: self._of(index).sketch(board.rank, self._open_ns(index, board, now_ns, gaps))
            for index, each in enumerate(board.sections)
        }
        idle_ns = self._open_ns(_IDLE, board, now_ns, gaps)
        return {**of_sections, OUT_OF_SECTION: self._kept[_IDLE].sketch(board.rank, idle_ns)}

    def _open_ns(self, index: int, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap]) -> int | None:
        """Return the age of the interval that is open, None without one."""
        if index >= 0:
            since_ns = self._open.get(index, -1)
            since_ns = since_ns or board.sections[index].opened_at_ns
        else:
            since_ns = self._idle_since if index == _IDLE and not self._open else 0
        if board.closing or since_ns <= 0:
            return None
        return max(0, now_ns - since_ns - lost_between(gaps, since_ns, now_ns))

    def take_minute(self, board: BoardSnapshot, now_ns: int, gaps: Sequence[Gap] = ()) -> Minute:
        """Return what was counted since the last minute was taken, up to ``now_ns``, and begin a new minute."""
        from_ns = self.minute_from_ns
        zero_ns = from_ns - from_ns % MINUTE_NS
        sections = {}
        for index, name in [*enumerate(each.name for each in board.sections), *_OTHERS]:
            kept, open_ns = self._minute.get(index), self._open_ns(index, board, now_ns, gaps)
            if kept is None and (open_ns is None or index < 0):
                continue
            kept = kept or _KeptOfMinute()
            spans = [((begin_ns - zero_ns) / 1e9, length_ns / 1e9) for begin_ns, length_ns in kept.spans]
            sections[name] = SectionMinute(
                sketch=kept.sketch(0, open_ns, MOST_LOGGED),
                total_s=kept.total_ns / 1e9,
                depth=kept.depth,
                spans=tuple(spans) if len(spans) <= MOST_SPANS else (),
            )
        minute = RankMinute(
            rank=board.rank,
            from_s=(from_ns - zero_ns) / 1e9,
            to_s=(now_ns - zero_ns) / 1e9,
            lost=self._lost,
            iterations=tuple((number, (at_ns - zero_ns) / 1e9) for number, at_ns in self._iterations),
            sections=sections,
        )
        self._minute, self._iterations, self._lost = {}, [], 0
        self.minute_from_ns = now_ns
        names = tuple(sections)
        return Minute(cycle=board.cycle, at_ns=zero_ns, names=names, ranks=(write_row(minute, names),))

    def _add(self, index: int, since_ns: int, at_ns: int, gaps: Sequence[Gap], *, is_first: bool) -> None:
        """Count an interval that has ended."""
        lost_ns = lost_between(gaps, since_ns, at_ns) if gaps and since_ns < gaps[-1].end_ns else 0
        length_ns = max(0, at_ns - since_ns - lost_ns)
        kept = self._of(index)
        is_explained = since_ns <= kept.explained_since_ns < at_ns
        kept.add(length_ns, is_first=is_first, is_explained=is_explained)
        minute = self._minute.get(index)
        if minute is None:
            minute = self._minute[index] = _KeptOfMinute()
        minute.add(length_ns, is_first=is_first, is_explained=is_explained)
        minute.ended += 1
        minute.total_ns += length_ns
        minute.depth = len(self._open)
        if len(minute.spans) <= MOST_SPANS:
            minute.spans.append((since_ns, length_ns))

    def _of(self, index: int) -> _Kept:
        kept = self._kept.get(index)
        if kept is None:
            kept = self._kept[index] = _Kept()
        return kept

    def _count(self, words: Sequence[int], now_ns: int, gaps: Sequence[Gap]) -> None:
        start_ns, open_, idle = self._start_ns, self._open, self._kept[_IDLE]
        for at, code in zip(words[::2], words[1::2], strict=True):
            kind = code >> KIND_SHIFT
            if not start_ns <= at <= now_ns or (kind != EVENT_START and kind != EVENT_END and kind not in _OTHER_KINDS):
                self._forget_starts()  # a stray write: which event it was isn't known
                open_ = self._open
            elif kind == EVENT_START:
                if not open_:
                    if self._idle_since:
                        self._add(_IDLE, self._idle_since, at, gaps, is_first=self._opened < FIRST_INTERVALS)
                    idle.ended += 1
                    self._idle_since = 0
                self._opened += 1
                open_[code >> SECTION_SHIFT & 0xFF] = at
            elif kind == EVENT_END:
                index = code >> SECTION_SHIFT & 0xFF
                since = open_.pop(index, 0)
                kept = self._of(index)
                if since:
                    self._add(index, since, at, gaps, is_first=kept.ended < FIRST_INTERVALS)
                kept.ended += 1
                if not open_:
                    self._idle_since = at
            elif kind == EVENT_ITERATION:
                self._iterations[1:] = [(code & layout.VALUE_MASK, at)]
            else:
                if self._heartbeat_ns:
                    self._add(_HEARTBEATS, self._heartbeat_ns, at, gaps, is_first=False)
                self._heartbeat_ns = at

    def _skip_lost(self, words: Sequence[int], board: BoardSnapshot) -> None:
        """Find out what was open before the first of these events: those before it were overwritten."""
        first_kinds: dict[int, int] = {}
        ends: dict[int, int] = {}
        starts = 0
        for code in words[1::2]:
            kind, index = code >> KIND_SHIFT, code >> SECTION_SHIFT & 0xFF
            if kind in (EVENT_START, EVENT_END):
                first_kinds.setdefault(index, kind)
                starts += kind == EVENT_START
                ends[index] = ends.get(index, 0) + (kind == EVENT_END)
        self._heartbeat_ns = 0
        by_board = _open_by_board(board)
        self._open = {index: 0 for index, kind in first_kinds.items() if kind == EVENT_END}
        for index, since_ns in by_board.items():
            if index not in first_kinds and (not words or since_ns <= words[0]):
                self._open[index] = since_ns
        self._idle_since = 0 if words or self._open else board.last_transition_ns
        self._opened = max(self._opened, sum(each.open_count for each in board.sections) - starts)
        for index, each in enumerate(board.sections):
            kept = self._of(index)
            kept.ended = max(kept.ended, each.open_count - (index in by_board) - ends.get(index, 0))

    def _forget_starts(self) -> None:
        self._open = dict.fromkeys(self._open, 0)
        self._idle_since = self._heartbeat_ns = 0

    def _compare(self, board: BoardSnapshot) -> None:
        """Trust the board where it contradicts the events twice in a row: one reading of it may be torn."""
        by_board = _open_by_board(board)
        doubts = {}
        for index in self._open.keys() | by_board.keys():
            known, said = self._open.get(index, -1), by_board.get(index, -1)
            if known != said:
                doubts[index] = _Doubt(known, said)
        if not self._open and not by_board and self._idle_since < board.last_transition_ns:
            doubts[_IDLE] = _Doubt(self._idle_since, board.last_transition_ns)
        settled = [index for index, doubt in doubts.items() if self._doubts.get(index) == doubt]
        self._doubts = doubts
        for index in settled:
            said = doubts[index].by_board_ns
            if index == _IDLE:
                self._idle_since = said
            elif said > 0:
                self._open[index] = said
            else:
                self._open.pop(index, None)
        if self._open:
            self._idle_since = 0


class Milestones:
    """Milestones of one rank in one cycle: each is taken once."""

    def __init__(self) -> None:
        self._steps = self._saves = 0
        self._has_ended = False

    def take(self, board: BoardSnapshot) -> list[Milestone]:
        """Return those that this board is the first to show."""
        if board.watch_only:
            return []
        found = []
        # a loop without hooks counts no steps
        counts_steps = board.steps > 0 or bool(board.learning_facts & layout.FACT_HOOKS)
        steps = _reached(board.steps if counts_steps else board.iterations_seen)
        if steps > self._steps:
            self._steps = steps
            found.append(Milestone(board.cycle, Moment.STEPS, steps))
        if board.saves > self._saves:
            self._saves = board.saves
            found.append(Milestone(board.cycle, Moment.SAVE, board.saves))
        # a rank that only ends its monitoring has failed, or goes on without it: its run isn't over
        if not self._has_ended and board.learning_facts & layout.FACT_RUN_ENDS:
            self._has_ended = True
            found.append(Milestone(board.cycle, Moment.END))
        return found


def facts_of(board: BoardSnapshot) -> Facts:
    """Return what the board says of the run for learning."""
    said = board.learning_facts
    return Facts(
        learns=bool(said & layout.FACT_LEARNS),
        has_hooks=bool(said & layout.FACT_HOOKS),
        loaded=bool(said & layout.FACT_LOADED),
        setup_open=any(each.name == SETUP and each.opened_at_ns for each in board.sections),
        enough_steps=bool(said & layout.FACT_ENOUGH_STEPS),
        saved=board.saves > 0,
        async_saves=bool(said & layout.FACT_ASYNC_SAVES),
    )


def _reached(steps: int) -> int:
    """Return the milestone that this number of steps has reached; 0: none."""
    if steps < _DOUBLED_FROM:
        return _FIRST_STEPS if steps >= _FIRST_STEPS else 0
    return 1 << (steps.bit_length() - 1)


def _open_by_board(board: BoardSnapshot) -> dict[int, int]:
    return {index: each.opened_at_ns for index, each in enumerate(board.sections) if each.opened_at_ns}


def _seconds(length_ns: int) -> float:
    return NO_INTERVAL if length_ns < 0 else length_ns / 1e9
