"""The hot path: section events, heartbeats and iterations, written to the progress board.

Nothing here makes a system call (``time.monotonic_ns`` is read from a page the kernel shares), takes a lock or waits.
The order of the stores matters where a comment says so: a monitor that reads between two of them must not see a rank
that is later than it is. Counters on the board wrap around: a board that was overwritten may hold any number, and must
not make a hook fail.
"""

from __future__ import annotations

import time

from megatron_ft.errors import RankMonitorClientError
from megatron_ft.learning.timeouts import OUT_OF_SECTION, HeartbeatTimeouts, SectionTimeouts
from megatron_ft.link.base import layout
from megatron_ft.link.base.intervals import STEP
from megatron_ft.link.base.layout import (
    EVENT_END,
    EVENT_HEARTBEAT,
    EVENT_ITERATION,
    EVENT_START,
    KIND_SHIFT,
    RING,
    RING_MASK,
    S_OPEN_COUNT,
    S_OPENED_AT,
    SECTION_SHIFT,
    VALUE_MASK,
    W_FIRST_ITERATION,
    W_FIRST_ITERATION_AT,
    W_FIRST_STEP_AT,
    W_HEARTBEATS,
    W_ITERATION,
    W_ITERATIONS_BACK,
    W_ITERATIONS_SEEN,
    W_LAST_HEARTBEAT,
    W_LAST_TRANSITION,
    W_RING_HEAD,
    W_WARM_UP_OVER_AT,
    W_WARMUP_ITERATIONS,
    WORD_MASK,
)
from megatron_ft.link.board import Board
from megatron_ft.rank.base import user_code
from megatron_ft.rank.base.say import warn

monotonic_ns = time.monotonic_ns
_HEARTBEAT_CODE = EVENT_HEARTBEAT << KIND_SHIFT
_ITERATION_CODE = EVENT_ITERATION << KIND_SHIFT


class Recorder:
    """Writes one rank's progress and keeps the longest intervals (nanoseconds) for the calculation."""

    def __init__(self, board: Board, timeouts: SectionTimeouts) -> None:
        self._board = board
        self._words = board.words
        self._head = 0
        self._opened: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._start_codes: dict[str, int] = {}
        self._end_codes: dict[str, int] = {}
        self._start_ns = board.words[layout.W_START]
        self._idle_since = self._start_ns
        self._last_heartbeat = 0
        self._last_iteration = -1
        self._in_first_step = False
        self._is_starting = not user_code.reports_iterations
        """True until a second "step" begins, which proves that the rank trains. False if the script reports iterations.
        """
        self._first_step_began = 0
        self._longest: dict[str, int] = {}
        self._longest_idle = -1
        self._facts = self._steps = self._saves = self._iterations_back = 0
        self.initial_heartbeat = -1
        self.longest_heartbeat = -1
        for index, name in enumerate(timeouts.section):
            self._register(name, index)

    def start(self, section: str) -> None:
        """See ``RankMonitorClient.start_section``."""
        opened = self._opened
        slot = self._slots.get(section)
        if slot is None:
            names = ", ".join(repr(name) for name in self._slots) or "none"
            warn(f"section {section!r} is not configured, and is skipped; configured sections: {names}")
            return
        if section in opened:
            raise RankMonitorClientError(f"section {section!r} is already open")
        words = self._words
        now = monotonic_ns()
        if self._is_starting and section == STEP:
            self._step_begins(now)
        if not opened:
            idle = now - self._idle_since
            if idle > self._longest_idle:
                self._longest_idle = idle
        opened[section] = now
        words[slot + S_OPEN_COUNT] = (words[slot + S_OPEN_COUNT] + 1) & WORD_MASK
        # open before the transition: the time out of section must not seem to continue
        words[slot + S_OPENED_AT] = now
        words[W_LAST_TRANSITION] = now
        head = self._head
        at = RING + ((head & RING_MASK) << 1)
        words[at] = now
        words[at + 1] = self._start_codes[section]
        self._head = words[W_RING_HEAD] = head + 1
        if section not in opened:
            self._clear(section)  # a signal handler has closed it in the meantime

    def end(self, section: str) -> None:
        """See ``RankMonitorClient.end_section``."""
        opened = self._opened
        since = opened.get(section)
        if since is None:
            if section not in self._slots:
                return  # skipped when it was opened
            self._clear(section)
            raise RankMonitorClientError(f"section {section!r} is already closed")
        words = self._words
        now = monotonic_ns()
        # the transition first: no open section with an old transition would look idle since then
        words[W_LAST_TRANSITION] = now
        words[self._slots[section] + S_OPENED_AT] = 0
        head = self._head
        at = RING + ((head & RING_MASK) << 1)
        words[at] = now
        words[at + 1] = self._end_codes[section]
        self._head = words[W_RING_HEAD] = head + 1
        # not earlier: if a signal handler raises in between, the section can still be closed
        opened.pop(section, None)
        if not opened:
            self._idle_since = now
        if now - since > self._longest[section]:
            self._longest[section] = now - since

    def heartbeat(self) -> None:
        words = self._words
        now = monotonic_ns()
        # the stamp before the count: a first count without a stamp would mean "since ever"
        words[W_LAST_HEARTBEAT] = now
        words[W_HEARTBEATS] = (words[W_HEARTBEATS] + 1) & WORD_MASK
        head = self._head
        at = RING + ((head & RING_MASK) << 1)
        words[at] = now
        words[at + 1] = _HEARTBEAT_CODE
        self._head = words[W_RING_HEAD] = head + 1
        if self._last_heartbeat:
            interval = now - self._last_heartbeat
            if interval > self.longest_heartbeat:
                self.longest_heartbeat = interval
        else:
            self.initial_heartbeat = now - self._start_ns
        self._last_heartbeat = now

    def iteration(self, number: int) -> None:
        if number < 0:
            raise RankMonitorClientError(f"iteration {number} is negative; iterations count from 0")
        if number == self._last_iteration:
            return
        words = self._words
        now = monotonic_ns()
        words[W_ITERATION] = number + 1
        if self._last_iteration < 0:
            words[W_FIRST_ITERATION] = number + 1
            words[W_FIRST_ITERATION_AT] = words[W_FIRST_ITERATION_AT] or now
        elif self._in_first_step and not words[W_FIRST_STEP_AT]:
            words[W_FIRST_STEP_AT] = now
        self._in_first_step = self._last_iteration < 0
        if number < self._last_iteration:
            self._iterations_back += 1
            words[W_ITERATIONS_BACK] = self._iterations_back
        seen = words[W_ITERATIONS_SEEN]
        if seen and seen == words[W_WARMUP_ITERATIONS]:
            # before the count: the time out of section, which has a timeout from then on, begins here
            words[W_WARM_UP_OVER_AT] = now
        words[W_ITERATIONS_SEEN] = (seen + 1) & WORD_MASK
        self._last_iteration = number
        head = self._head
        at = RING + ((head & RING_MASK) << 1)
        words[at] = now
        words[at + 1] = _ITERATION_CODE | (number & VALUE_MASK)
        self._head = words[W_RING_HEAD] = head + 1

    def observed(self) -> dict[str, int]:
        """Return the longest ended interval (ns) by section and OUT_OF_SECTION; -1 where none has ended."""
        return {**self._longest, OUT_OF_SECTION: self._longest_idle}

    def open_ages(self) -> dict[str, int]:
        """Return the age (ns) of each open section, or of the time out of section if none is open."""
        now = monotonic_ns()
        if not self._opened:
            return {OUT_OF_SECTION: now - self._idle_since}
        return {name: now - since for name, since in self._opened.items()}

    def restart_clocks(self) -> None:
        """Restart the clocks of the time out of section and since the last heartbeat.

        A finished collective is progress. Without a restart, a rank that waited long for others in a calculation would
        be late as soon as the new, shorter timeouts take effect.
        """
        now = monotonic_ns()
        if not self._opened:
            if self._longest_idle >= 0:  # before the first section all of the time counts, once it has ended
                self._longest_idle = max(self._longest_idle, now - self._idle_since)
                self._idle_since = now
            self._words[W_LAST_TRANSITION] = now
        if self._last_heartbeat:
            self._last_heartbeat = now
            self._words[W_LAST_HEARTBEAT] = now

    @property
    def open_sections(self) -> list[str]:
        """Names of the open sections, outermost first."""
        return list(self._opened)

    def set_facts(self, facts: int, is_true: bool = True) -> None:
        """Set or clear FACT_ bits of `link.base.layout` on the board."""
        self._facts = self._facts | facts if is_true else self._facts & ~facts
        self._words[layout.W_LEARNING_FACTS] = self._facts

    def step_ended(self, enough: int) -> None:
        """Count a training step; after ``enough`` steps their length is typical."""
        self._steps += 1
        self._words[layout.W_STEPS] = self._steps
        if self._steps == enough:
            self.set_facts(layout.FACT_ENOUGH_STEPS)

    def saved(self) -> None:
        """Count a persistent save."""
        self._saves += 1
        self._words[layout.W_SAVES] = self._saves

    def add_section(self, name: str) -> None:
        """Add a section without a timeout.

        Raises:
            ValueError: the board's table is full.
        """
        index = len(self._slots)
        self._board.put_section(index, name, None)
        self._words[layout.W_SECTION_COUNT] = index + 1
        self._register(name, index)

    def write_timeouts(self, timeouts: SectionTimeouts, heartbeats: HeartbeatTimeouts) -> None:
        """Write the timeouts in force to the board."""
        words = self._words
        # count before and after: timeouts that change without their version look like damage
        version = words[layout.W_TIMEOUTS_VERSION]
        words[layout.W_TIMEOUTS_VERSION] = (version + 1) & WORD_MASK
        for name, timeout in timeouts.section.items():
            slot = self._slots[name]
            words[slot + layout.S_TIMEOUT] = layout.timeout_word(timeout)
            words[slot + layout.S_CALCULATED] = int(name in timeouts.calculated_sections)
        words[layout.W_OUT_OF_SECTION_TIMEOUT] = layout.timeout_word(timeouts.out_of_section)
        words[layout.W_OUT_OF_SECTION_CALCULATED] = int(timeouts.is_out_of_section_calculated)
        words[layout.W_INITIAL_HEARTBEAT_TIMEOUT] = layout.timeout_word(heartbeats.initial)
        words[layout.W_HEARTBEAT_TIMEOUT] = layout.timeout_word(heartbeats.subsequent)
        words[layout.W_HEARTBEAT_FLAGS] = layout.FLAG_ARE_LEARNED if heartbeats.were_calculated else 0
        words[layout.W_TIMEOUTS_VERSION] = (version + 2) & WORD_MASK

    def _register(self, name: str, index: int) -> None:
        self._slots[name] = layout.slot(index)
        self._start_codes[name] = EVENT_START << KIND_SHIFT | index << SECTION_SHIFT
        self._end_codes[name] = EVENT_END << KIND_SHIFT | index << SECTION_SHIFT
        self._longest.setdefault(name, -1)

    def _step_begins(self, now: int) -> None:
        """Note a "step". The second one proves training, unless the script reports iterations.

        The end of the first proves nothing: an exception ends it, too.
        """
        words = self._words
        if self._longest[STEP] < 0:
            self._first_step_began = now
            return
        self._is_starting = False
        if not words[W_FIRST_ITERATION_AT]:
            words[W_FIRST_ITERATION_AT] = self._first_step_began
        if not words[W_FIRST_STEP_AT]:
            words[W_FIRST_STEP_AT] = now

    def _clear(self, section: str) -> None:
        # two threads or a signal handler may have raced in one section; a section that isn't open must not look open
        slot = self._slots.get(section)
        if slot is not None:
            self._words[slot + S_OPENED_AT] = 0
