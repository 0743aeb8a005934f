"""The monitor's service: it sleeps until a timeout may be over or an event arrives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.diagnosis.evidence import RankEvidence, evidence_text
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.errors import ProtocolError
from megatron_ft.learning.messages import Arm
from megatron_ft.learning.progress import ProgressSample, progress_between
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.base.escalation import Escalation
from megatron_ft.link.base.layout import BoardDamagedError
from megatron_ft.link.facts.monitor import Detached, Signalled
from megatron_ft.link.facts.shared import RankHung, Warning_
from megatron_ft.link.linux.proc import run_delays_ns
from megatron_ft.link.linux.processes import is_gone, is_in, send_signal, signal_main_thread, wait_gone
from megatron_ft.link.log import MONITOR
from megatron_ft.link.messages.monitor_messages import (
    ORDERS,
    Collect,
    ExtendTimeout,
    GuardGroup,
    Observation,
    Pause,
    RankOrder,
    Release,
    Resume,
    Stop,
)
from megatron_ft.link.messages.rank_messages import (
    FROM_RANK,
    RankHello,
    RankRefused,
    RankShown,
    RankWelcome,
    ShowRank,
    ToRank,
)
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.link.wire import Channel, ChannelClosedError, accept_peer
from megatron_ft.monitor.collect_evidence import collect
from megatron_ft.monitor.end_of_rank import end_orphans, remove_run_directory
from megatron_ft.monitor.last_look import LastLook, take_sample
from megatron_ft.monitor.process import MonitorSettings
from megatron_ft.monitor.reports import Reports
from megatron_ft.monitor.watched_rank import WatchedRank

_MOST_CALLERS = 16
_PATIENCE_S = 5.0
"""Seconds a connection may stay silent before it is closed."""
_LAUNCHER_ENDS_S = 3.0
"""Seconds from the end of a launcher's sockets to the end of its process."""


class Caller(NamedTuple):
    """A connection that hasn't said yet what it wants. ``pid`` comes from the kernel, never from the peer."""

    fd: int
    channel: Channel
    pid: int
    pidfd: int
    give_up_s: float


class MonitorService:
    """Watches one rank at a time, cycle after cycle, until the launcher orders a stop or the parent dies."""

    def __init__(self, settings: MonitorSettings, reports: Reports, signal_fd: int, parent_pidfd: int) -> None:
        self._settings = settings
        self._reports = reports
        self._name = f"the monitor of local rank {settings.local_rank}"
        self._signal_fd = signal_fd
        self._parent_pidfd = parent_pidfd
        self._listener = socket.socket(fileno=settings.listen_fd)
        self._reactor = Reactor()
        self._callers: list[Caller] = []
        self._watched: WatchedRank | None = None
        self._termination: Escalation | None = None
        self._has_launcher = settings.launcher_fd is not None
        self._last_look = LastLook(reports, has_launcher=self._has_launcher, asks_first=settings.asks_first)
        self._first: tuple[Collect, ProgressSample] | None = None
        """A rank that is being examined: the order, and what the rank did then."""
        self._next_look_ns: int | None = None
        self._running = True
        self._paused_at_ns: int | None = None
        self._started: int | None = None
        """Process group of the rank that the launcher started last."""
        self._rank: int | None = None
        """Global rank given by the launcher; restarts within the process don't change it."""

    def run(self) -> None:
        self._reactor.watch(self._signal_fd, self._take_signals, Priority.SIGNAL)
        self._reactor.watch(self._parent_pidfd, self._parent_is_gone, Priority.DEATH)
        self._reactor.watch(self._listener.fileno(), self._accept)
        if self._settings.launcher_fd is not None:
            self._reactor.watch(self._settings.launcher_fd, self._hear_launcher)
        if self._settings.attached is not None:
            self._watch(WatchedRank.take_over(self._settings.attached, self._settings.config))
        while self._running:
            self._reactor.run_once(self._timeout_s())
            if self._reports.launcher_is_gone:
                self._launcher_is_gone()
            for caller in [each for each in self._callers if time.monotonic() >= each.give_up_s]:
                self._dismiss(caller)
            self._act_if_due()
        self._stop()

    def _timeout_s(self) -> float | None:
        times = [caller.give_up_s for caller in self._callers]
        if self._termination is not None and self._termination.due_s is not None:
            times.append(self._termination.due_s)
        if self._first is not None:
            times.append((self._first[0].again_ns or 0) / 1e9)
        if self._next_look_ns is not None and self._paused_at_ns is None:
            times.append(self._next_look_ns / 1e9)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _parent_is_gone(self) -> None:
        self._reports.launcher_is_gone = True

    def _hear_launcher(self) -> None:
        for received in self._reports.from_launcher():
            self._obey(received.message)

    def _woken(self, watched: WatchedRank) -> None:
        with contextlib.suppress(BlockingIOError):  # the rank can read it, too
            os.eventfd_read(watched.attached.wake_fd)
        self._next_look_ns = time.monotonic_ns()

    def _obey(self, message: Raw) -> None:
        """Do what the launcher says."""
        MONITOR.debug("from launcher", message)
        try:
            order = ORDERS.parse(message)
        except ProtocolError as error:
            text = f"{self._name} ignored an order of the launcher that it can't read: {error}"
            self._reports.complain("order", text)
            return
        if isinstance(order, RankOrder):
            watched = self._watched
            if watched is not None and watched.attached.cycle == order.cycle:
                self._obey_of_rank(watched, order)
            return  # meant for an earlier rank
        match order:
            case Stop():
                self._running = False
            case GuardGroup():
                self._started, self._rank = order.pid, order.rank  # the rank leads its own group and session
            case Pause(since_ns) if self._paused_at_ns is None:
                # a replacement monitor is told since when its predecessor was paused
                now_ns = time.monotonic_ns()
                self._paused_at_ns = min(since_ns or now_ns, now_ns)
                if self._watched is not None:
                    self._watched.rest()
            case Resume() if self._paused_at_ns is not None:
                paused_at_ns, self._paused_at_ns = self._paused_at_ns, None
                self._last_look.clear()
                if self._watched is not None:
                    self._next_look_ns = time.monotonic_ns()
                    self._watched.detector.excuse(paused_at_ns, self._next_look_ns)

    def _obey_of_rank(self, watched: WatchedRank, order: RankOrder) -> None:
        match order:
            case Collect(again_ns=again_ns) if again_ns is not None and watched.note is None:
                self._first = order, take_sample(watched.attached, watched.final_snapshot())
            case Collect(deadline_ns=deadline_ns, passive=passive):
                self._examine(watched, None, passive=passive, deadline_ns=deadline_ns)
            case Release() if self._termination is not None:
                self._termination.begin(time.monotonic())
            case Release():
                self._last_look.clear()  # the cycle is over: the launcher ends this rank with all others
            case Arm():
                watched.armed = order
                self._next_look_ns = time.monotonic_ns()
            case ExtendTimeout():
                self._last_look.obey(watched, order)
                self._next_look_ns = time.monotonic_ns()

    def _take_signals(self) -> None:
        for number in os.read(self._signal_fd, 64):
            if number == signal.SIGCONT and self._watched is not None:
                self._watched.was_stopped = True
                self._next_look_ns = time.monotonic_ns()
            elif number in (signal.SIGTERM, signal.SIGINT) and self._settings.launcher_fd is None:
                self._running = False

    def _accept(self) -> None:
        """Accept one connection of the same user. At the limit, the oldest one that hasn't spoken is closed."""
        if len(self._callers) >= _MOST_CALLERS:
            self._dismiss(self._callers[0])
        accepted = accept_peer(self._listener)
        if accepted is not None:
            caller = Caller(accepted[0].fileno(), *accepted, time.monotonic() + _PATIENCE_S)
            self._callers.append(caller)
            self._reactor.watch(caller.fd, partial(self._read_hello, caller))

    def _dismiss(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._reactor.unwatch(caller.fd)
        caller.channel.close()
        os.close(caller.pidfd)

    def _read_hello(self, caller: Caller) -> None:
        try:
            received = caller.channel.receive(everything=False)  # a peer that never pauses must not block us
            if not received:
                return
            greeting = FROM_RANK.parse(received[0].message)
            if isinstance(greeting, RankHello) and greeting.user_code_ns > time.monotonic_ns():
                raise ProtocolError(f"hello has user_code_ns = {greeting.user_code_ns}, which is still to come")
        except ProtocolError as error:
            text = f"{self._name} refused a connection from process {caller.pid}: {error}"
            self._reports.complain("refused", text)
        except ChannelClosedError:
            pass
        else:
            if isinstance(greeting, ShowRank):
                self._answer(caller, self._shown())
            elif (reason := self._refusal(greeting, caller)) is not None:
                self._answer(caller, RankRefused(reason))
            else:
                self._welcome(caller, greeting)
        self._dismiss(caller)

    def _shown(self) -> RankShown | RankRefused:
        """Return what the rank does now, for a person: nothing is concluded or written, and the rank gets no signal."""
        watched = self._watched
        if watched is None or watched.has_ended:
            return RankRefused("its script has called no hook and has no process group")
        deadline_ns = time.monotonic_ns() + round(EVIDENCE_S * 1e9)
        return RankShown(evidence_text(self._collect(watched, None, passive=True, deadline_ns=deadline_ns)))

    def _collect(
        self, watched: WatchedRank, verdict: RankHung | None, *, passive: bool, deadline_ns: int
    ) -> RankEvidence:
        attached, board, snapshot = watched.attached, watched.board, watched.final_snapshot()
        local_rank = self._settings.local_rank
        return collect(
            attached, board, snapshot, verdict, local_rank=local_rank, passive=passive, deadline_ns=deadline_ns
        )

    def _refusal(self, greeting: RankHello, caller: Caller) -> str | None:
        """Return why a hello is refused, None if it is accepted.

        A higher cycle wins: the rank of the earlier one is about to end. Within a cycle the first rank wins as long as
        it lives and is monitored. A rank of the launcher also wins against a stranger of a higher cycle: a process that
        isn't in the process group the launcher started last.
        """
        watched, started = self._watched, self._started
        if watched is None:
            return None
        pid, cycle, lives = watched.attached.pid, watched.attached.cycle, not is_gone(watched.attached.pidfd)
        if greeting.again and lives and pid == caller.pid and greeting.watch_only == watched.is_watch_only:
            return None  # reported by the previous monitor, which died before it answered
        if pid == caller.pid:
            watched.note_new_program()  # the process may have re-executed itself, for example to set a variable
        if greeting.cycle < cycle:
            return f"cycle {greeting.cycle} is over, this monitor watches cycle {cycle}"
        # a rank that is watched by its collectives only may call hooks later
        if not lives or watched.has_ended or (watched.is_watch_only and not greeting.watch_only):
            return None
        if greeting.cycle == cycle:
            return f"process {pid} of cycle {cycle} is connected already"
        if started is not None and is_in(pid, started) and not is_in(caller.pid, started):
            ours = f"the launcher's rank of cycle {cycle} (process {pid}) still runs"
            return f"cycle {greeting.cycle} has not begun, {ours}"
        self._reports.complain(
            "displaced",
            f"process {caller.pid} connected for cycle {greeting.cycle} and takes the monitor of rank "
            f"{watched.attached.rank}; process {pid} of cycle {cycle} still runs and is no longer monitored",
        )
        return None

    def _welcome(self, caller: Caller, greeting: RankHello) -> None:
        if self._rank is not None and self._started is not None and is_in(caller.pid, self._started):
            greeting = replace(greeting, rank=self._rank)
        try:
            watched = WatchedRank.attach(self._settings.config, greeting, pid=caller.pid, pidfd=caller.pidfd)
        except OSError as error:
            reason = f"no memory for the progress board ({error.strerror})"
            self._reports.complain("no memory", reason)
            self._answer(caller, RankRefused(reason))
            return
        self._leave_rank()
        self._watch(watched)
        # report to the launcher first: once welcomed, a rank can be taken over
        self._reports.attached(watched.attached, greeting)
        attached, settings = watched.attached, self._settings
        welcome = RankWelcome(config=settings.config.to_dict(), log_dir=settings.log_dir, run_id=settings.run_id)
        fds = (attached.board_fd, attached.wake_fd, attached.stack_fd, watched.answers_fd)
        was_sent = self._answer(caller, welcome, fds)
        watched.hand_over()
        if not was_sent and not is_gone(attached.pidfd):
            self._leave_rank()  # it gave up waiting while this process was stopped, and will try again

    def _answer(self, caller: Caller, message: ToRank | RankShown, fds: tuple[int, ...] = ()) -> bool:
        """Return True if the message could be sent."""
        try:
            caller.channel.send(message, fds)
        except ChannelClosedError:
            return False
        return True

    def _watch(self, watched: WatchedRank) -> None:
        self._watched = watched
        self._reactor.watch(watched.attached.wake_fd, partial(self._woken, watched))
        self._reactor.watch(watched.attached.pidfd, self._rank_is_gone, Priority.DEATH)
        self._next_look_ns = time.monotonic_ns()

    def _act_if_due(self) -> None:
        self._reports.report_written()
        if self._watched is not None:
            first = self._first
            if first is not None and time.monotonic_ns() >= (first[0].again_ns or 0):
                self._first = None
                self._examine(self._watched, None, passive=True, deadline_ns=first[0].deadline_ns, first=first[1])
        if self._termination is not None:
            self._go_on_terminating(self._termination)
        elif self._watched is not None and self._next_look_ns is not None and self._paused_at_ns is None:
            if time.monotonic_ns() >= self._next_look_ns:
                self._look(self._watched)

    def _look(self, watched: WatchedRank) -> None:
        self._next_look_ns = None
        if not watched.is_damaged:
            self._judge(watched)
        if watched.take_end():
            attached, now_ns = watched.attached, time.monotonic_ns()
            self._reports.record(Detached(rank=attached.rank, cycle=attached.cycle, pid=attached.pid, at_ns=now_ns))

    def _judge(self, watched: WatchedRank) -> None:
        try:
            snapshot, outcome = watched.read()
        except BoardDamagedError as error:
            rank = f"rank {watched.attached.rank}"
            until = f"hangs of {rank} are not detected until its next cycle"
            self._reports.warn(
                f"the progress board of {rank} was written over by the training process ({error}): {until}"
            )
            return
        verdict = outcome.verdict
        if verdict is not None and watched.note_new_program():
            self._judge(watched)
            return
        self._reports.news(watched, snapshot)
        self._reports.minute(watched)
        self._next_look_ns = outcome.next_look_ns
        if verdict is not None and self._last_look.ask_launcher_first(watched, verdict):
            self._next_look_ns = time.monotonic_ns()  # its interval has more time now
        elif verdict is not None:
            self._end_hung(watched, verdict)

    def _end_hung(self, watched: WatchedRank, verdict: RankHung) -> None:
        """Terminate a hung rank, whatever evidence there is; in observe-only mode, or if the timeout isn't enforced,
        report it."""
        only_reports = self._settings.observe_only or not verdict.enforced
        attached, now_ns = watched.attached, time.monotonic_ns()
        deadline_ns = now_ns + round(EVIDENCE_S * 1e9)
        if not only_reports:
            # the launcher sends Release after it has seen the other ranks, which would fall if this one did
            due_s = (deadline_ns if self._has_launcher else now_ns) / 1e9
            self._termination = Escalation(self._settings.config.rank_termination_signal, due_s=due_s)
        verdict = self._reports.rank_hung(attached, verdict, observed_only=only_reports)
        self._reports.record(verdict)
        self._reports.minute(watched, at_once=not only_reports, is_last=not only_reports)
        try:
            self._examine(watched, verdict, passive=only_reports, deadline_ns=deadline_ns)
        except Exception as error:  # noqa: BLE001 - a rank is terminated whether or not evidence can be collected
            self._reports.warn(f"the evidence on rank {attached.rank} can't be collected: {error!r}")
        if only_reports:
            watched.detector.dismiss(verdict)
            self._next_look_ns = time.monotonic_ns()

    def _examine(
        self,
        watched: WatchedRank,
        verdict: RankHung | None,
        *,
        passive: bool,
        deadline_ns: int,
        first: ProgressSample | None = None,
    ) -> None:
        """Report evidence; ``first``: with what the rank has done since, not written as it only may hang."""
        if watched.note is not None:
            # collect once only: collecting may have woken the rank
            if verdict is not None:
                watched.note = replace(watched.note, found_hung=True)
            self._reports.tell(Observation(watched.attached.cycle, watched.note))
            return
        watched.note_new_program()
        evidence = self._collect(watched, verdict, passive=passive, deadline_ns=deadline_ns)
        if first is not None:
            progress = progress_between(first, take_sample(watched.attached, watched.final_snapshot()))
            evidence = replace(evidence, note=replace(evidence.note, progress=progress))
        if not passive:
            watched.note = evidence.note
        self._reports.evidence(None if first is not None else self._settings.log_dir, evidence)

    def _go_on_terminating(self, termination: Escalation) -> None:
        assert self._watched is not None
        attached, was_due_s = self._watched.attached, termination.due_s
        due = termination.advance(time.monotonic(), lambda: run_delays_ns(attached.pid))
        if due is not None:
            # Python runs handlers in the main thread only, which may sleep on in C if another thread takes the signal.
            # Sent to the main thread, the signal is pending when SIGCONT lets a stopped process run.
            signal_main_thread(attached.pid, attached.pidfd, due)
            send_signal(attached.pidfd, signal.SIGCONT)
            rank, cycle, pid, now_ns = attached.rank, attached.cycle, attached.pid, time.monotonic_ns()
            for name in (due.name, signal.SIGCONT.name):
                self._reports.record(Signalled(rank=rank, cycle=cycle, pid=pid, signal=name, at_ns=now_ns))
        if was_due_s is not None and termination.due_s is None:
            self._reports.warn(f"rank {attached.rank} (process {attached.pid}) is still running after SIGKILL")

    def _rank_is_gone(self) -> None:
        assert self._watched is not None
        attached, snapshot = self._watched.attached, self._watched.final_snapshot()
        if snapshot is not None:
            self._reports.news(self._watched, snapshot)
            self._reports.minute(self._watched, at_once=True)
        self._reports.rank_gone(attached, snapshot)
        self._leave_rank()

    def _leave_rank(self) -> None:
        if self._watched is not None:
            self._reactor.unwatch(self._watched.attached.wake_fd)
            self._reactor.unwatch(self._watched.attached.pidfd)
            self._watched.rest()
            self._watched.close()
        self._watched = None
        self._termination = None
        self._last_look.clear()
        self._first = self._next_look_ns = None

    def _launcher_is_gone(self) -> None:
        self._running = False
        if self._settings.launcher_fd is None:
            return
        if not is_gone(self._parent_pidfd) and not wait_gone(self._parent_pidfd, _LAUNCHER_ENDS_S):
            # the launcher lives and will start another monitor: no reason to end the rank
            self._reports.warn("lost the connection to the launcher, which starts another monitor: exiting")
            return
        self._reports.record(Warning_(text="the launcher has died: ending what is left of the rank"))
        left = end_orphans(self._settings.socket_path, self._started)
        if left:
            pids = sorted({each.pid for each in left})
            who = f"process {pids[0]} is" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} are"
            self._reports.warn(f"{who} still running after SIGKILL")
        remove_run_directory(self._settings.socket_path)

    def _stop(self) -> None:
        if self._watched is not None and is_gone(self._watched.attached.pidfd):
            self._rank_is_gone()  # the end of the rank may be read after the order to stop
        self._reports.finish_writing()
        self._leave_rank()
        while self._callers:
            self._dismiss(self._callers[0])
        self._listener.close()
        if self._settings.launcher_fd is None:
            with contextlib.suppress(OSError):  # another process removed it first
                os.unlink(self._settings.socket_path)
