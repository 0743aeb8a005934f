"""The watch of a rank whose script calls no hooks: what torch knows of its collectives, on its board once a second.

A daemon thread connects the rank to its monitor, reads torch's own counts and writes them to the board; the launcher
detects hangs by them (`core.agent.collectives`). The training thread only starts it. Once a script calls hooks, those
are what counts: then the watch ends, or never begins.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

from megatron_ft.core.board import layout
from megatron_ft.core.diagnosis.stacks import user_frame
from megatron_ft.core.errors import RankMonitorClientError
from megatron_ft.ipc.board import Board
from megatron_ft.ipc.files.evidence_files import LIBRARIES
from megatron_ft.rank.base import agreement
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.base.connection import MONITOR_SOCKET, Welcome, say_hello
from megatron_ft.rank.collectives import arrival
from megatron_ft.rank.crash_reporter.flight_recorder import Counts, counts
from megatron_ft.rank.crash_reporter.reporter import CrashReporter, main_stack

_EVERY_S = 1.0

_current: CollectiveWatch | None = None
_lock = threading.Lock()
_calls_hooks = False


def begin() -> None:
    """The script has made a process group: watch its collectives, if it is the one of the launcher's ranks."""
    global _current
    if not _is_of_all_ranks():
        return
    with _lock:
        if _current is None and not _calls_hooks:
            _current = CollectiveWatch()
            _current.start()


def end() -> None:
    """The script calls hooks, which say more: it is never watched again."""
    global _current, _calls_hooks
    with _lock:
        watch, _current, _calls_hooks = _current, None, True
        if watch is not None:
            watch.end()


def _is_of_all_ranks() -> bool:
    """Whether this process is one of several ranks of the launcher, and the group is that of all of them.

    What a rank starts may make a group of its own.
    """
    if not (arrival.is_wanted(os.environ) and MONITOR_SOCKET in os.environ):
        return False
    launched = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    return (str(agreement.world_size()), str(agreement.rank())) == launched


class CollectiveWatch:
    """The watch of this process's collectives."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._crash_reporter = CrashReporter()
        self._board: Board | None = None
        self._known: Counts | None = None
        self._moved_ns = 0
        self._place = ""

    def start(self) -> None:
        """Begin in a thread of its own."""
        with contextlib.suppress(RuntimeError):  # no more threads are allowed: then it isn't watched
            threading.Thread(target=self._run, name="megatron_ft_collectives", daemon=True).start()

    def end(self) -> None:
        """Stop. The caller holds the lock, so nothing begins afterwards."""
        self._is_over.set()
        self._crash_reporter.end()

    def forget_in_child(self) -> None:
        """A forked child (a data-loader worker) isn't the rank."""
        self._crash_reporter.forget_in_child()
        if self._board is not None:
            self._board.close()

    def _run(self) -> None:
        info = RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
        try:
            welcome = say_hello(os.environ[MONITOR_SOCKET], info, 0, watch_only=True)
        except RankMonitorClientError:
            return  # the script has called hooks meanwhile; or there is no monitor, which the launcher reports
        os.close(welcome.wake_fd)
        if not self._take(welcome):
            return
        while True:
            self._write_counts(welcome.board)
            if self._is_over.wait(_EVERY_S):
                break
        self._board = None
        welcome.board.close()

    def _take(self, welcome: Welcome) -> bool:
        """Get ready to answer questions; False if the watch has ended meanwhile."""
        with _lock:
            if not self._is_over.is_set():
                self._board = welcome.board
                self._crash_reporter.begin(welcome.board, welcome.stack_fd, welcome.ask_fd)
                return True
        welcome.board.close()
        os.close(welcome.stack_fd)
        os.close(welcome.ask_fd)
        return False

    def _write_counts(self, board: Board) -> None:
        """Write the counts, and where the main thread is, to the board. This takes some tenths of a millisecond."""
        found, now_ns = counts(), time.monotonic_ns()
        if found != self._known:
            self._known, self._moved_ns = found, now_ns
        words: Any = board.words
        if found is None:
            words[layout.W_COLLECTIVES_SEEN_AT] = 0
        else:
            words[layout.W_COLLECTIVES_ENTERED] = sum(entered for entered, _ in found.values())
            words[layout.W_COLLECTIVES_COMPLETED] = sum(completed for _, completed in found.values())
            # a board that had to be renewed knows nothing from before
            words[layout.W_COLLECTIVE_AT] = max(self._moved_ns, words[layout.W_START])
            words[layout.W_COLLECTIVES_SEEN_AT] = now_ns
        frame = user_frame(main_stack(), library=LIBRARIES)
        place = "" if frame is None else str(frame)
        if place != self._place:
            self._place = place
            board.put_place(place)


def _forget_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()  # a thread may have held it that this process doesn't have
    watch, _current = _current, None
    if watch is not None:
        watch.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
