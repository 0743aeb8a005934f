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
from megatron_ft.core.board.intervals import FIRST_INTERVALS, SETUP, HangKind, IntervalKey, is_blank
from megatron_ft.core.board.layout import EVENT_END, EVENT_START, KIND_SHIFT, SECTION_SHIFT, BoardSnapshot
from megatron_ft.core.timeouts.exchange import Facts, Milestone, Moment
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, bounded
from megatron_ft.core.timeouts.tail import bucket_of

_OUT_OF_SECTION = HangKind.OUT_OF_SECTION.value
_IDLE = -1
"""Index of the time out of section among those of sections."""
_OTHER_KINDS = frozenset((layout.EVENT_HEARTBEAT, layout.EVENT_ITERATION))
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

    def add(self, start_ns: int, end_ns: int, lost_ns: int, *, is_first: bool) -> None:
        """Count an interval that has ended."""
        length_ns = max(0, end_ns - start_ns - lost_ns)
        if length_ns > self.longest_ns:
            self.longest_ns = length_ns
        is_explained = start_ns <= self.explained_since_ns < end_ns
        if is_explained and length_ns > self.explained_ns:
            self.explained_ns = length_ns
        if is_first:
            if length_ns > self.first_ns:
                self.first_ns = length_ns
        elif not is_explained:
            bucket = bucket_of(length_ns / 1e9)
            self.counts[bucket] = self.counts.get(bucket, 0.0) + 1.0

    def sketch(self, rank: int, open_ns: int | None) -> Sketch:
        return Sketch(
            ended=min(max(self.ended, 0), layout.MOST_COUNT),
            longest_s=_seconds(self.longest_ns),
            rank=rank,
            first_s=_seconds(self.first_ns),
            explained_s=_seconds(self.explained_ns),
            open_s=NO_INTERVAL if open_ns is None else open_ns / 1e9,
            tail=bounded(self.counts),
        )


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
            self._skip_lost(words, board)
        self.read_to = first + len(words) // 2
        self._count(words, now_ns, gaps)
        if not is_blank(board):  # else the rank hasn't given back yet what is open
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

        def age_ns(since_ns: int) -> int | None:
            if board.closing or not since_ns:
                return None
            return max(0, now_ns - since_ns - lost_between(gaps, since_ns, now_ns))

        found = {}
        for index, each in enumerate(board.sections):
            since_ns = self._open.get(index, -1)
            found[each.name] = self._of(index).sketch(
                board.rank, age_ns(since_ns or each.opened_at_ns) if since_ns >= 0 else None
            )
        idle_ns = None if self._open else age_ns(self._idle_since)
        return {**found, _OUT_OF_SECTION: self._kept[_IDLE].sketch(board.rank, idle_ns)}

    def _of(self, index: int) -> _Kept:
        kept = self._kept.get(index)
        if kept is None:
            kept = self._kept[index] = _Kept()
        return kept

    def _count(self, words: Sequence[int], now_ns: int, gaps: Sequence[Gap]) -> None:
        last_gap_ns = gaps[-1].end_ns if gaps else 0
        start_ns, open_, idle = self._start_ns, self._open, self._kept[_IDLE]
        for at, code in zip(words[::2], words[1::2], strict=True):
            kind = code >> KIND_SHIFT
            if not start_ns <= at <= now_ns or (kind != EVENT_START and kind != EVENT_END and kind not in _OTHER_KINDS):
                self._forget_starts()  # a stray write: which event it was isn't known
                open_ = self._open
            elif kind == EVENT_START:
                if not open_:
                    since = self._idle_since
                    if since:
                        lost_ns = lost_between(gaps, since, at) if since < last_gap_ns else 0
                        idle.add(since, at, lost_ns, is_first=self._opened < FIRST_INTERVALS)
                    idle.ended += 1
                    self._idle_since = 0
                self._opened += 1
                open_[code >> SECTION_SHIFT & 0xFF] = at
            elif kind == EVENT_END:
                index = code >> SECTION_SHIFT & 0xFF
                since = open_.pop(index, 0)
                kept = self._of(index)
                if since:
                    lost_ns = lost_between(gaps, since, at) if since < last_gap_ns else 0
                    kept.add(since, at, lost_ns, is_first=kept.ended < FIRST_INTERVALS)
                kept.ended += 1
                if not open_:
                    self._idle_since = at

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
        self._idle_since = 0

    def _compare(self, board: BoardSnapshot) -> None:
        """Trust the board where it contradicts the events twice in a row: one reading of it may be torn."""
        by_board = _open_by_board(board)
        doubts = {}
        for index in self._open.keys() | by_board.keys():
            known, said = self._open.get(index, -1), by_board.get(index, -1)
            # on a renewed board, a section is open since the renewal
            if known != said and not (board.epoch and 0 < known < said):
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
