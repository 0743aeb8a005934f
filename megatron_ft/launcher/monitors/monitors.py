"""The rank monitors of this node: one per local rank, for the whole job, replaced when they die or are stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from megatron_ft.launcher.monitors.slot import MonitorSlot
from megatron_ft.launcher.rules import events
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.facts import launcher as records
from megatron_ft.link.messages.control_messages import PauseDetection, ResumeDetection
from megatron_ft.link.messages.monitor_messages import Release
from megatron_ft.link.reactor import Reactor
from megatron_ft.monitor.process import MonitorOptions
from megatron_ft.records.event_log import EventLog

_CHECK_S = 1.0
_STOP_WAIT_S = 2.0


class Monitors:
    """All monitors of this node.

    Args:
        on_event: gets their reports on ranks.
        on_check: called every second, before the monitors are checked.
    """

    def __init__(
        self,
        *,
        count: int,
        options: MonitorOptions,
        run_dir: str,
        reactor: Reactor,
        log: EventLog,
        say: Callable[[str], None],
        on_event: Callable[[events.MonitorReport], None],
        on_check: Callable[[], None],
    ) -> None:
        self.paused = Pauses()
        self._pause_lines = RateLimiter()
        self._reactor = reactor
        self._log = log
        self._say = say
        self._on_check = on_check
        self._slots = [
            MonitorSlot(
                local_rank,
                socket_path=os.path.join(run_dir, f"monitor-{local_rank}.sock"),
                options=options,
                reactor=reactor,
                log=log,
                say=say,
                on_event=on_event,
            )
            for local_rank in range(count)
        ]
        self._timer = reactor.call_later(_CHECK_S, self._check_looks)

    def is_lost(self) -> bool:
        """Return True if the socket of a monitor was removed."""
        return any(slot.is_lost() for slot in self._slots)

    def listen_again(self) -> None:
        """Recreate removed sockets.

        Raises:
            OSError: a socket can't be made.
        """
        for slot in self._slots:
            slot.listen_again()

    def start(self) -> None:
        """Start all monitors: before the ranks, whose groups they end if the launcher is killed.

        Raises:
            OSError: a socket or process can't be made.
        """
        for slot in self._slots:
            slot.start()

    def __getitem__(self, local_rank: int) -> MonitorSlot:
        return self._slots[local_rank]

    def pids(self) -> set[int]:
        """Return the PIDs of running monitors."""
        return {slot.pid for slot in self._slots if slot.pid is not None}

    def release(self, order: Release) -> None:
        """Let monitors terminate hung ranks now: the evidence of all ranks is collected."""
        for slot in self._slots:
            slot.order(order)

    def pause_or_resume(self, order: PauseDetection | ResumeDetection, by: int) -> bool:
        """Suspend hang detection on this node, or resume it, for process ``by``. Return True if that changes anything.

        The time of a pause counts for no rank.
        """
        since_ns, now_ns = self.paused.since_ns, time.monotonic_ns()
        if not (self.paused.begin(now_ns) if isinstance(order, PauseDetection) else self.paused.end(now_ns)):
            return False
        for slot in self._slots:
            slot.pause(self.paused.since_ns)
        if since_ns is None:
            self._say_seldom(f"paused by process {by}: hang detection is off on this node until `megatron-ft resume`")
            self._log.write(records.Paused(by=by))
        else:
            after = f"{(now_ns - since_ns) / 1e9:.1f} s"
            self._say_seldom(
                f"hang detection resumed by process {by} after {after}; the pause counts against no timeout"
            )
            self._log.write(records.Resumed(by=by))
        return True

    def _say_seldom(self, line: str) -> None:
        text = self._pause_lines.admit(line, time.monotonic())
        if text is not None:
            self._say(text)

    def check_states(self) -> None:
        """Replace monitors that were stopped by a signal. Called after each SIGCHLD."""
        for slot in self._slots:
            slot.replace_if_stopped()

    def hear_all(self) -> None:
        """Read all pending messages of monitors."""
        for slot in self._slots:
            slot.read()

    def stop(self) -> None:
        """End all monitors and release everything."""
        self._timer.cancel()
        for slot in self._slots:
            slot.ask_to_stop()
        deadline = time.monotonic() + _STOP_WAIT_S
        for slot in self._slots:
            slot.end(deadline)

    def _check_looks(self) -> None:
        self._on_check()
        for slot in self._slots:
            slot.replace_if_overdue()
        self._timer = self._reactor.call_later(_CHECK_S, self._check_looks)
