"""The rank monitors of this node: one per local rank, for the whole job, replaced when they die or are stopped."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.learning.messages import Arm
from megatron_ft.link.base import layout
from megatron_ft.link.base.layout import BoardDamagedError
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.board import Board
from megatron_ft.link.facts.launcher import MonitorReplaced, Paused, Resumed
from megatron_ft.link.facts.monitor import Attached
from megatron_ft.link.facts.shared import RankHung, Warning_
from megatron_ft.link.helper_process import HelperProcess
from megatron_ft.link.linux.processes import is_gone
from megatron_ft.link.messages.monitor_messages import (
    REPORTS,
    GuardGroup,
    Logged,
    Order,
    Pause,
    RankOrder,
    RankReport,
    Report,
    Resume,
    Stop,
    Suspect,
)
from megatron_ft.link.process_tree import is_stopped
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import close_fds, listen
from megatron_ft.monitor import process as monitor_process
from megatron_ft.records.event_log import EventLog

_CHECK_S = 1.0
_ATTACHED_FDS = 5
"""The board, and what a replacement monitor needs to go on with the rank."""
_OVERDUE_NS = 5_000_000_000
_SHORT_LIFE_S = 2.0
_LONGEST_PAUSE_S = 5.0
_STOPPED_FOR_S = 0.1
_STOP_WAIT_S = 2.0
_SEND_S = 0.1
_MAX_LAST_WORDS_BYTES = 1 << 20


@dataclass
class MonitorSlot:
    """Keeps one monitor at work; a new process takes over the board, timeouts and waiting ranks of the old one."""

    local_rank: int
    _: KW_ONLY
    path: str
    """Path of the socket, in the run directory."""
    options: monitor_process.MonitorOptions
    reactor: Reactor
    log: EventLog
    say: Callable[[str], None]
    on_event: Callable[[events.MonitorReport], None]
    listener: socket.socket | None = None
    _process: HelperProcess | None = None
    _attached: monitor_process.AttachedRank | None = None
    _board: Board | None = None
    _short_lives: int = 0
    _seen_overdue: bool = False
    _standing: dict[str, Order] = field(default_factory=dict)
    """Orders that a replacement gets, too: the group to end if the launcher dies, and a pause or its end."""
    _is_ending: bool = False
    """True once the job is over: reports are only logged."""
    _arm: Arm | None = None
    """Learned timeouts armed last, for one cycle."""

    @property
    def pid(self) -> int | None:
        """PID of the current process; None without one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Create the socket, at which a rank can connect and wait, and start the process that serves it.

        Raises:
            OSError: a socket or process can't be made.
        """
        if self.listener is None:
            self.listener = listen(self.path)
        spawn = functools.partial(
            monitor_process.spawn,
            listen_fd=self.listener.fileno(),
            socket_path=self.path,
            local_rank=self.local_rank,
            options=self.options,
            attached=None if self._attached is None or is_gone(self._attached.pidfd) else self._attached,
        )
        self._process = HelperProcess(
            *(self.reactor, lambda fd: spawn(launcher_fd=fd)),
            parse=REPORTS.parse,
            take=self._take,
            ended=self._replace,
        )
        for standing in self._standing.values():
            self._order(standing)  # read before it checks a rank
        self._arm_attached()

    def listen_again(self) -> None:
        """Recreate the socket, which was removed, and a process that serves it.

        Raises:
            OSError: the socket can't be made.
        """
        assert self.listener is not None
        lost, self.listener = self.listener, listen(self.path)
        lost.close()
        if self._process is not None:  # otherwise a process is about to be started
            self._replace("has lost its socket")

    def reading(self, cycle: int) -> RankReading:
        """Return the rank's board in this cycle and its collectives, or that the board is damaged.

        For a rank without hooks only its collectives; nothing if no rank is attached.
        """
        if self._board is None or self._attached is None or self._attached.cycle != cycle:
            return RankReading()
        try:
            snapshot = self._board.snapshot()
        except BoardDamagedError:
            return RankReading(damaged=True)
        return RankReading(None if snapshot.watch_only else snapshot, collectives=snapshot.collectives)

    def read(self) -> None:
        """Read the monitor's messages."""
        if self._process is not None:
            self._process.read()

    def replace_if_stopped(self) -> None:
        """Replace a monitor that was stopped (SIGSTOP): it would detect no hang.

        It is checked now and a moment later: when a whole node is continued, the launcher may be first.
        """

        def stopped() -> bool:
            return self.pid is not None and is_stopped(self.pid)

        if stopped():
            self.reactor.call_later(_STOPPED_FOR_S, lambda: self._replace("was stopped") if stopped() else None)

    def replace_if_overdue(self) -> None:
        """Replace a monitor that has missed its own announced check by 5 s, whatever blocks it."""
        if self._process is None or self._board is None or self._attached is None:
            return
        next_look = self._board.words[layout.W_NEXT_LOOK]
        overdue = (
            0 < next_look < layout.NO_TIMEOUT
            and time.monotonic_ns() - next_look > _OVERDUE_NS
            and not is_gone(self._attached.pidfd)
        )
        # twice in a row: after a suspension of the whole node every monitor is late once
        if overdue and self._seen_overdue:
            self._replace(f"has not checked its rank for more than {_OVERDUE_NS / 1e9:g} s")
            overdue = False
        self._seen_overdue = overdue

    def rank_started(self, pid: int, rank: int | None) -> None:
        """Tell the monitor, and replacements, which group to end if the launcher dies. ``rank`` is global."""
        self._standing["group"] = GuardGroup(pid, rank)
        self._order(self._standing["group"])

    def last_words(self, cycle: int) -> str:
        """Return what the rank of this cycle wrote of its stacks and last exception; empty if it never connected."""
        if self._attached is None or self._attached.cycle != cycle:
            return ""
        return os.pread(self._attached.stack_fd, _MAX_LAST_WORDS_BYTES, 0).decode(errors="replace")

    def order(self, order: RankOrder) -> None:
        """Send an order; learned timeouts are armed by a monitor that replaces this one, too."""
        if isinstance(order, Arm):
            self._arm = order
            self._arm_attached()
        else:
            self._order(order)

    def state_written(self, value: int) -> None:
        """Tell the rank what became of the learned timeouts: a STATE_ value of the board."""
        if self._board is not None:
            self._board.words[layout.W_STATE_WRITTEN] = value

    def pause(self, since_ns: int | None) -> None:
        """Suspend hang detection, also in a replacement process, from ``since_ns`` on (monotonic); None resumes it."""
        self._standing["pause"] = Resume() if since_ns is None else Pause(since_ns)
        self._order(self._standing["pause"])

    def ask_to_stop(self) -> None:
        """Tell the monitor that the job is over."""
        self._is_ending = True
        self._order(Stop())

    def end(self, deadline: float) -> None:
        """Wait for its end until the deadline (time.monotonic), then kill it; release everything."""
        if self._process is not None:
            self._process.wait(deadline)
            self._process.dismiss()
            self._process.wait(time.monotonic() + _STOP_WAIT_S)
        self._forget_rank()
        if self.listener is not None:
            self.listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _arm_attached(self) -> None:
        if self._arm is not None and self._attached is not None and self._arm.cycle == self._attached.cycle:
            self._order(self._arm)

    def _order(self, order: Order) -> None:
        if self._process is not None:
            self._process.send(order, timeout_s=_SEND_S)

    def _replace(self, reason: str) -> None:
        """Start another process in place of this one, which is killed."""
        process = self._process
        if process is None or self._is_ending:
            return
        self._process = None
        process.dismiss()
        lived_s = time.monotonic() - process.started_s
        # a process that fails at once must not be restarted a thousand times a second
        self._short_lives = self._short_lives + 1 if lived_s < _SHORT_LIFE_S else 0
        pause_s = min(_LONGEST_PAUSE_S, 0.1 * 2**self._short_lives) if self._short_lives > 1 else 0.0
        self._say_replaced(reason, pause_s)
        self.log.write(MonitorReplaced(local_rank=self.local_rank, rank=self._rank(), reason=reason, pid=process.pid))
        if pause_s:
            self.reactor.call_later(pause_s, self._spawn_again)
        else:
            self._spawn_again()

    def _spawn_again(self) -> None:
        if self.listener is None or self.listener.fileno() < 0:
            return  # the job has ended
        try:
            self.start()
        except OSError as error:
            # the node is out of some resource; ranks are unwatched until it works again, which is reported
            self._say_replaced(f"can't be started: {error}", _LONGEST_PAUSE_S)
            self.reactor.call_later(_LONGEST_PAUSE_S, self._spawn_again)

    def _say_replaced(self, reason: str, pause_s: float) -> None:
        rank = self._rank()
        whose = f"local rank {self.local_rank}" if rank is None else f"rank {rank}"
        if pause_s:
            self.say(
                f"the monitor of {whose} {reason}; starting another one in {pause_s:g} s, {whose} is not monitored "
                "until then"
            )
        else:
            self.say(f"the monitor of {whose} {reason}; replacing it")

    def _take(self, report: Report, fds: tuple[int, ...]) -> None:
        if isinstance(report, Attached):
            self._attach(report, fds)
        else:
            close_fds(fds)
        if isinstance(report, Warning_):
            self.say(report.text)
        if not self._is_ending and (event := event_of(self.local_rank, report)) is not None:
            self.on_event(event)
        if isinstance(report, Logged) and not (isinstance(report, Attached) and report.watch_only):
            self.log.write(report)

    def _attach(self, report: Attached, fds: tuple[int, ...]) -> None:
        if len(fds) != _ATTACHED_FDS:
            close_fds(fds)
            raise ProtocolError(f"attached comes with {_ATTACHED_FDS} descriptors, not {len(fds)}")
        self._forget_rank()
        board, wake, pidfd, stack, ask = fds
        self._attached = monitor_process.AttachedRank(
            board, wake, pidfd, stack, ask, report.pid, report.rank, report.cycle
        )
        self._board = Board(self._attached.board_fd)
        self._seen_overdue = False
        self._arm_attached()  # it may have been attached before, without hooks

    def _forget_rank(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._attached is not None:
            close_fds(self._attached.fds)
            self._attached = None

    def _rank(self) -> int | None:
        return None if self._attached is None else self._attached.rank


def event_of(local_rank: int, report: Report) -> events.MonitorReport | None:
    """Return a monitor's report as an event of the launcher's machine; None if it isn't about a rank."""
    if not isinstance(report, RankReport):
        return None
    match report:
        case RankHung():
            report = replace(report, local_rank=local_rank)
        case Suspect(verdict):
            report = Suspect(replace(verdict, local_rank=local_rank))
    return events.MonitorReport(local_rank, report)


class Monitors:
    """All monitors of this node. ``on_check`` is called every second, before the monitors are checked."""

    def __init__(
        self,
        slots: Sequence[MonitorSlot],
        reactor: Reactor,
        *,
        log: EventLog,
        say: Callable[[str], None],
        on_check: Callable[[], None],
    ) -> None:
        self.slots = slots
        self.paused = Pauses()
        self._pause_lines = RateLimiter()
        self._reactor, self._log, self._say, self._on_check = reactor, log, say, on_check
        self._timer = reactor.call_later(_CHECK_S, self._check_looks)

    def __getitem__(self, local_rank: int) -> MonitorSlot:
        return self.slots[local_rank]

    def pause_or_resume(self, order: Pause | Resume, by: int) -> bool:
        """Suspend hang detection on this node, or resume it, for process ``by``. Return True if that changes anything.

        The time of a pause counts for no rank.
        """
        since_ns, now_ns = self.paused.since_ns, time.monotonic_ns()
        if not (self.paused.begin(now_ns) if isinstance(order, Pause) else self.paused.end(now_ns)):
            return False
        for slot in self.slots:
            slot.pause(self.paused.since_ns)
        if since_ns is None:
            self._say_seldom(f"paused by process {by}: hang detection is off on this node until `megatron-ft resume`")
            self._log.write(Paused())
        else:
            after = f"{(now_ns - since_ns) / 1e9:.1f} s"
            self._say_seldom(
                f"hang detection resumed by process {by} after {after}; the pause counts against no timeout"
            )
            self._log.write(Resumed())
        return True

    def _say_seldom(self, line: str) -> None:
        if (text := self._pause_lines.admit(line, time.monotonic())) is not None:
            self._say(text)

    def hear_all(self) -> None:
        """Read all pending messages of monitors."""
        for slot in self.slots:
            slot.read()

    def stop(self) -> None:
        """End all monitors and release everything."""
        self._timer.cancel()
        for slot in self.slots:
            slot.ask_to_stop()
        deadline = time.monotonic() + _STOP_WAIT_S
        for slot in self.slots:
            slot.end(deadline)

    def _check_looks(self) -> None:
        self._on_check()
        for slot in self.slots:
            slot.replace_if_overdue()
        self._timer = self._reactor.call_later(_CHECK_S, self._check_looks)
