"""One rank in one cycle, as its monitor sees it: board, pidfd, and the state kept between readings."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from megatron_ft.config.config import ConfigValues
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.learning.intervals import BoardIntervals, reached_by
from megatron_ft.learning.messages import Arm, Intervals
from megatron_ft.learning.rule import with_armed
from megatron_ft.link.base import layout
from megatron_ft.link.base.layout import BoardDamagedError, BoardSnapshot
from megatron_ft.link.board import Board, create_memory
from megatron_ft.link.facts import monitor as records
from megatron_ft.link.facts.minutes import MINUTE_NS
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.proc import has_mapped
from megatron_ft.link.linux.processes import has_hung_up, is_gone
from megatron_ft.link.messages.rank_messages import RankHello
from megatron_ft.link.wire import close_fds
from megatron_ft.monitor.collect_evidence import STACK_MEMORY
from megatron_ft.monitor.process import AttachedRank
from megatron_ft.monitor.rules.consistency import contradiction
from megatron_ft.monitor.rules.hang_detector import Check, HangDetector

_FIRST_STEP_LOOK_NS = 20_000_000
_FIRST_STEP_SHARE = 8
TORN_S = 0.002
_MAPS_S = 0.2
_reads = FileQueue()


class WatchedRank:
    """One attached rank. Owns its descriptors."""

    def __init__(self, attached: AttachedRank, config: ConfigValues, *, start_ns: int) -> None:
        self.attached = attached
        self.board = Board(attached.board_fd)
        self._check_interval_ns = round(config.workload_check_interval * 1e9)
        self.detector = HangDetector(check_interval_ns=self._check_interval_ns, last_look_ns=start_ns)
        self.was_stopped = False
        """True if this monitor, and maybe the whole node, was stopped since the last reading."""
        self._shown_timeouts: tuple[int, Arm | None] = 0, None
        self.armed: Arm | None = None
        """Learned timeouts, which apply from the next reading on, also to sections that the rank adds later."""
        self._intervals: BoardIntervals | None = None
        self._reached = 0, 0, False
        """Milestones that were reported: saves, steps, and the end of the run."""
        self._has_last_minute = False
        self._has_shown_iteration = self._has_shown_step = self._has_shown_end = False
        self.is_damaged = self.board.words[layout.W_MAGIC] == layout.DAMAGED
        """True once the board was found to be written over. From then on the rank isn't judged."""
        self.last_good: BoardSnapshot | None = None
        self.note: RankSnapshot | None = None
        """Evidence collected on the rank because it is about to be terminated."""
        self.answers_fd = -1
        """The rank's end of the socket behind ``ask_fd``, until it is handed over."""

    @classmethod
    def attach(cls, config: ConfigValues, hello: RankHello, *, pid: int, pidfd: int) -> WatchedRank:
        """Create a board for a rank that said hello. ``pidfd`` stays the caller's.

        Raises:
            OSError: there is no memory for a board.
        """
        start_ns = time.monotonic_ns()
        made: list[int] = []
        try:
            made.append(os.dup(pidfd))
            made.append(create_memory())
            made.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            made.append(os.memfd_create(STACK_MEMORY, os.MFD_CLOEXEC))
            made += (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            own_pidfd, board_fd, wake_fd, stack_fd, ask_fd, answers_fd = made
            attached = AttachedRank(board_fd, wake_fd, own_pidfd, stack_fd, ask_fd, pid, hello.rank, hello.cycle)
            watched = cls(attached, config, start_ns=start_ns)
        except OSError:
            close_fds(made)
            raise
        watched.answers_fd = answers_fd
        timeouts: dict[str, Any] = {
            "initial_heartbeat": config.initial_rank_heartbeat_timeout,
            "heartbeat": config.rank_heartbeat_timeout,
            "sections": config.rank_section_timeouts,
            "out_of_section": config.rank_out_of_section_timeout,
        }
        watched.board.initialise(
            cycle=hello.cycle,
            rank=hello.rank,
            pid=pid,
            start_ns=start_ns,
            warmup_iterations=hello.warmup_iterations,
            watch_only=hello.watch_only,
            **({} if hello.watch_only else timeouts),
        )
        watched.last_good = watched.board.snapshot()  # no other process has the board yet
        watched._intervals = BoardIntervals(watched.last_good)
        return watched

    @classmethod
    def take_over(cls, attached: AttachedRank, config: ConfigValues) -> WatchedRank:
        """Continue with the board of a monitor that died or was stopped."""
        watched = cls(attached, config, start_ns=time.monotonic_ns())
        words = watched.board.words
        now = time.monotonic_ns()
        # if a due check is missing, the node may have been stopped; the detector allows for it
        if 0 < words[layout.W_LAST_LOOK] <= now:
            next_look_ns = words[layout.W_NEXT_LOOK]
            watched.detector.last_look_ns = words[layout.W_LAST_LOOK]
            watched.detector.asked_ns = None if next_look_ns == layout.NO_TIMEOUT else next_look_ns
        return watched

    def read(self) -> tuple[BoardSnapshot, Check]:
        """Take and check one snapshot.

        Raises:
            BoardDamagedError: the board was written over. It is marked, and not to be read again: what looks right on
                it may be a stray value, too.
        """
        try:
            snapshot, now = self._snapshot()
        except BoardDamagedError:
            time.sleep(TORN_S)  # the rank may have been in the middle of a change
            try:
                snapshot, now = self._snapshot()
            except BoardDamagedError:
                self.is_damaged, self.board.words[layout.W_MAGIC] = True, layout.DAMAGED
                self.rest()
                raise
        self.detector.check_interval_ns = self._check_interval_ns
        if not (snapshot.first_step_at_ns or snapshot.watch_only):
            # a hook must not wake the monitor, so it looks for the first step: often at first, then ever less often
            first_step_ns = max(_FIRST_STEP_LOOK_NS, (now - snapshot.start_ns) // _FIRST_STEP_SHARE)
            self.detector.check_interval_ns = min(self._check_interval_ns, first_step_ns)
        outcome = self.detector.check(snapshot, now, was_stopped=self.was_stopped)
        self.was_stopped = False
        self.last_good = snapshot
        words = self.board.words
        words[layout.W_LAST_LOOK] = now
        words[layout.W_NEXT_LOOK] = layout.NO_TIMEOUT if outcome.next_look_ns is None else outcome.next_look_ns
        self._feed(snapshot, now)
        return snapshot, outcome

    def take_news(self, snapshot: BoardSnapshot) -> Iterator[records.Record | Intervals]:
        """Yield what this reading shows for the first time: milestones, timeouts, first iteration and step."""
        rank, cycle = self.attached.rank, self.attached.cycle
        reached = *reached_by(snapshot), bool(snapshot.learning_facts & layout.FACT_RUN_ENDS)
        if reached != self._reached and not snapshot.watch_only:
            self._reached = reached
            now_ns = time.monotonic_ns()
            yield self._feed(snapshot, now_ns).observed(snapshot, now_ns, self.detector.gaps)
        timeouts = snapshot.timeouts_version, self.armed
        if timeouts != self._shown_timeouts:
            self._shown_timeouts = timeouts
            yield records.Timeouts(
                rank=rank,
                cycle=cycle,
                version=snapshot.timeouts_version,
                initial_heartbeat=seconds(snapshot.initial_heartbeat_timeout_ns),
                heartbeat=seconds(snapshot.heartbeat_timeout_ns),
                sections={s.name: seconds(s.timeout_ns) for s in snapshot.sections},
                out_of_section=seconds(snapshot.out_of_section_timeout_ns),
            )
        if snapshot.first_iteration_at_ns and not self._has_shown_iteration:
            self._has_shown_iteration = True
            iteration, at_ns = snapshot.first_iteration or 0, snapshot.first_iteration_at_ns
            yield records.FirstIteration(rank=rank, cycle=cycle, iteration=iteration, at_ns=at_ns)
        if snapshot.first_step_at_ns and not self._has_shown_step:
            self._has_shown_step = True
            began_ns, at_ns = snapshot.first_iteration_at_ns, snapshot.first_step_at_ns
            yield records.FirstStep(rank=rank, cycle=cycle, began_ns=began_ns, at_ns=at_ns)

    @property
    def has_ended(self) -> bool:
        """True once the rank has ended its monitoring, also on a damaged board."""
        return bool(self.board.words[layout.W_CLOSING] == layout.CLOSING)

    def take_end(self) -> bool:
        """Return True once, when the rank has ended its monitoring."""
        is_first = self.has_ended and not self._has_shown_end
        self._has_shown_end |= is_first
        return is_first

    def take_minute(self, *, at_once: bool = False, is_last: bool = False) -> Minute | None:
        """Return the intervals since the last of these; None if that is less than a minute ago, unless ``at_once``.

        After the last one, what still ends follows from the end of the rank, and isn't counted.
        """
        board, intervals = self.last_good, self._intervals
        if board is None or intervals is None or board.watch_only or not board.ring_head or self._has_last_minute:
            return None
        now_ns = time.monotonic_ns()
        if not at_once and now_ns // MINUTE_NS == intervals.minute_from_ns // MINUTE_NS:
            return None
        self._has_last_minute = is_last
        # with what has ended since the last look
        return self._feed(board, now_ns).take_minute(board, now_ns, self.detector.gaps)

    @property
    def is_watch_only(self) -> bool:
        """True if the script calls no hooks, so that only the launcher can detect a hang, by its collectives."""
        return self.last_good is not None and self.last_good.watch_only

    def final_snapshot(self) -> BoardSnapshot | None:
        """Return the board's current snapshot, or the last good one if the board is damaged by now."""
        try:
            self.last_good, _ = self._snapshot()
        except BoardDamagedError:
            pass  # a dying rank may have written anything; the last good snapshot still holds
        return self.last_good

    def note_new_program(self) -> bool:
        """Mark the board as closed if the rank has exec'ed another program, in which nothing is monitored yet.

        Return True if it was marked.
        """
        attached = self.attached
        if self.has_ended or not has_hung_up(attached.ask_fd) or is_gone(attached.pidfd):
            return False  # an exec closes the rank's end, so most calls stop here
        inode = os.fstat(attached.board_fd).st_ino
        if _reads.call(lambda: has_mapped(attached.pid, inode), True, bound_s=_MAPS_S):
            return False
        self.board.words[layout.W_CLOSING] = layout.CLOSING
        return True

    def rest(self) -> None:
        """Note on the board that no further check is due."""
        self.board.words[layout.W_NEXT_LOOK] = layout.NO_TIMEOUT

    def close(self) -> None:
        """Close all descriptors and the board."""
        self.board.close()
        self.hand_over()
        for fd in self.attached.fds:
            os.close(fd)

    def hand_over(self) -> None:
        """Close the rank's end of the socket, which the rank has by now or never will."""
        if self.answers_fd >= 0:
            os.close(self.answers_fd)
            self.answers_fd = -1

    def _snapshot(self) -> tuple[BoardSnapshot, int]:
        raw = self.board.raw()
        now = time.monotonic_ns()  # taken after the bytes were read, so that no valid time stamp lies in the future
        snapshot = layout.decode(raw, now)
        why = None if self.last_good is None else contradiction(self.last_good, snapshot)
        if why is not None:
            raise BoardDamagedError(why)
        snapshot = with_armed(self.armed, snapshot)
        self.board.put_armed(snapshot)
        return snapshot, now

    def _feed(self, snapshot: BoardSnapshot, now_ns: int) -> BoardIntervals:
        intervals = self._intervals
        if intervals is None:  # the previous monitor has counted the events so far
            intervals = self._intervals = BoardIntervals(snapshot, from_ring_head=snapshot.ring_head)
        if snapshot.ring_head > intervals.read_to and not snapshot.watch_only:
            first, words = self.board.ring_words(intervals.read_to, snapshot.ring_head)
        else:
            first, words = intervals.read_to, []
        intervals.feed(first, words, snapshot, now_ns, self.detector.gaps)
        return intervals


def seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
