"""The watch of a rank's collectives: writes torch's counts to the rank's board, several times a second.

A daemon thread reads the counts. The launcher detects silence by them (`diagnosis.launcher.collective_watch`), and the
coordinator a rank that holds the others back (`diagnosis.slow_ranks`). The training thread only starts the
thread. If the script calls hooks, it uses their board; otherwise it connects the rank to its monitor itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import sys
import threading
import time
from typing import Any

from megatron_ft.diagnosis.stacks import user_frame
from megatron_ft.errors import RankMonitorClientError
from megatron_ft.link.base import layout
from megatron_ft.link.base.rank_variables import wants_watch
from megatron_ft.link.board import Board
from megatron_ft.link.files.evidence_files import LIBRARIES
from megatron_ft.rank.base import agreement, loaded_modules
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.base.connection import MONITOR_SOCKET, MonitorWelcome, say_hello
from megatron_ft.rank.crash_reporter.flight_recorder import Counts, counts, group_timeout_ns
from megatron_ft.rank.crash_reporter.reporter import CrashReporter, main_stack

_BETWEEN_S = (0.1, 0.2)
"""Seconds between two looks, at random: regular ones might meet each step at the same point."""
_LATE_S = 0.05
"""A look that comes later than this had to wait for the interpreter: the rank was computing, not in a collective."""
_PLACE_EVERY_S = 1.0
_THREAD = "megatron_ft_collectives"
_LAST_LOOK_S = 1.0
"""Seconds to wait at the interpreter's exit for a look in progress, which takes less than a millisecond."""

current: CollectiveWatch | None = None
_lock = threading.RLock()
"""Held while a board is written or taken away: a thread must not write to unmapped memory."""
calls_hooks = False
_hooks_board: Board | None = None


def begin() -> None:
    """Start the watch if the process group is that of the launcher's ranks."""
    global current
    if not _is_of_all_ranks():
        return
    with _lock:
        if current is None and (_hooks_board is not None or not calls_hooks):
            current = CollectiveWatch()
            with contextlib.suppress(RuntimeError):  # no more threads are allowed: go on unwatched
                threading.Thread(target=current.run, name=_THREAD, daemon=True).start()


def hooks_begin() -> None:
    """Drop the watch's own connection: the script is about to connect by its hooks."""
    global calls_hooks
    with _lock:
        calls_hooks = True
        if current is not None:
            current.disconnect()


def hooks_connected(board: Board) -> None:
    """Write to this board from now on."""
    global _hooks_board
    with _lock:
        _hooks_board = board
    begin()  # the process group may have been made before


def hooks_end(board: Board) -> None:
    """End the watch if it uses this board, which is about to be closed."""
    global current, _hooks_board
    with _lock:
        if _hooks_board is not board:
            return
        watch, current, _hooks_board = current, None, None
        if watch is not None:
            watch.end()


def _is_of_all_ranks() -> bool:
    """Return True if this process is one of several ranks, and its default process group spans all of them.

    A program that a rank starts may make a group of its own.
    """
    if not (wants_watch(os.environ) and MONITOR_SOCKET in os.environ and agreement.has_process_group()):
        return False
    launched = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    return (str(agreement.world_size()), str(agreement.rank())) == launched


class CollectiveWatch:
    """Watch of this process's collectives."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.crash_reporter = CrashReporter()
        self.own_board: Board | None = None
        self._known: Counts | None = None
        self._modules = 0
        self._moved_ns = 0
        self._looks = self._waiting = self._waits = 0
        self._was_waiting = False
        self._next_place_s = 0.0
        self._place = ""
        self._timeout_ns: int | None = None
        self._placed: tuple[Board | None, str] = None, ""

    def end(self) -> None:
        """Stop for good. The caller holds the lock."""
        self.is_over.set()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the watch's own connection. The caller holds the lock."""
        self.crash_reporter.end()
        if self.own_board is not None:
            self.own_board.close()
            self.own_board = None

    def run(self) -> None:
        if not calls_hooks:
            info = RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
            try:
                self._take(say_hello(info, 0, watch_only=True))
            except RankMonitorClientError:
                pass  # the script has called hooks in the meantime; or there is no monitor, which the launcher reports
        chance = random.Random()  # an own generator: the module's one belongs to the program
        late_s = 0.0
        while (self.own_board is not None or calls_hooks) and not self.is_over.is_set():
            self.look(is_late=late_s > _LATE_S)
            due_s = time.monotonic() + chance.uniform(*_BETWEEN_S)
            self.is_over.wait(max(0.0, due_s - time.monotonic()))
            late_s = time.monotonic() - due_s

    def _take(self, welcome: MonitorWelcome) -> None:
        """Get ready to answer questions, unless the script has begun to call hooks in the meantime."""
        os.close(welcome.wake_fd)
        with _lock:
            if not (self.is_over.is_set() or calls_hooks):
                self.own_board = welcome.board
                self.crash_reporter.begin(welcome.board, welcome.stack_fd, welcome.ask_fd)
                return
        welcome.board.close()
        os.close(welcome.stack_fd)
        os.close(welcome.ask_fd)

    def look(self, *, is_late: bool) -> None:
        """Read the counts, in some hundredths of a millisecond; once a second also the main thread's place."""
        found, now_ns = counts(), time.monotonic_ns()
        if loaded_modules.current is not None:
            loaded_modules.current.note()
        if (found, len(sys.modules)) != (self._known, self._modules):  # a rank that still imports isn't silent
            self._known, self._modules, self._moved_ns = found, len(sys.modules), now_ns
        if found is not None:
            is_waiting = not is_late and any(each.is_in_one for each in found.values())
            self._looks += 1
            self._waiting += is_waiting
            self._waits += is_waiting and not self._was_waiting
            self._was_waiting = is_waiting
        if now_ns / 1e9 >= self._next_place_s:
            self._next_place_s = now_ns / 1e9 + _PLACE_EVERY_S
            frame = user_frame(main_stack(), library=LIBRARIES)
            self._place = "" if frame is None else str(frame)
            self._timeout_ns = None if found is None else group_timeout_ns()
        with _lock:  # held only for the stores: the training thread may wait for it
            board = _hooks_board if calls_hooks else self.own_board
            if board is not None and not self.is_over.is_set():
                self._write(board, now_ns)

    def _write(self, board: Board, now_ns: int) -> None:
        words: Any = board.words
        if self._known is None:
            words[layout.W_COLLECTIVES_SEEN_AT] = 0
        else:
            words[layout.W_COLLECTIVES_ENTERED] = sum(each.entered for each in self._known.values())
            words[layout.W_COLLECTIVES_COMPLETED] = sum(each.completed for each in self._known.values())
            words[layout.W_LOOKS] = self._looks
            words[layout.W_LOOKS_WAITING] = self._waiting
            words[layout.W_WAITS] = self._waits
            # no stamp may lie before the start of a board that began later, maybe during this look
            words[layout.W_COLLECTIVE_AT] = max(self._moved_ns, words[layout.W_START])
            words[layout.W_COLLECTIVES_SEEN_AT] = max(now_ns, words[layout.W_START])
        words[layout.W_GROUP_TIMEOUT] = self._timeout_ns or 0
        if (board, self._place) != self._placed:
            self._placed = board, self._place
            board.put_place(self._place)


def _end_before_exit() -> None:
    """End the thread while it can still return from torch.

    At the interpreter's exit, Python ends a daemon thread that asks for the GIL. Below torch's C++ that ends the
    process with SIGABRT ("terminate called without an active exception").
    """
    if current is not None:
        current.is_over.set()
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(_LAST_LOOK_S)


atexit.register(_end_before_exit)


def _forget_in_child() -> None:
    global current, _lock, _hooks_board
    _lock = threading.RLock()  # may be held by a thread that this process doesn't have
    watch, current, _hooks_board = current, None, None
    if watch is not None:
        watch.crash_reporter.forget(in_child=True)  # a data-loader worker isn't the rank
        watch.disconnect()


os.register_at_fork(after_in_child=_forget_in_child)
