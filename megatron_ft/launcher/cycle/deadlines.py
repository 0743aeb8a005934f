"""Ranks that nobody's board shows: before their monitoring has begun, and after they have ended it.

A rank that doesn't start monitoring within ``--ft-startup-timeout`` of its start, or doesn't exit within
``--ft-exit-timeout`` of its shutdown, is ended as hung, and the restart policy decides. One exception: after
its shutdown a rank may have nothing left to do. If other ranks of the node have exited with 0, none has failed
and none is still at work, then a rank that merely doesn't exit counts as finished, too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.core.board.pauses import Pauses
from megatron_ft.core.diagnosis.exits import HangVerdict, describe_hang
from megatron_ft.core.diagnosis.rank_snapshot import LOOK_S
from megatron_ft.core.grace import Grace
from megatron_ft.core.messages.monitor import Seen
from megatron_ft.core.records.monitor import Attached, Detached
from megatron_ft.core.records.shared import Verdict
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux.proc import run_delays_ns
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.base.event_loop import Reactor, Timer
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.processes import process_tree
from megatron_ft.launcher.processes.worker import Worker

__all__ = ["Punctuality"]

_LATE_NS = 500_000_000
"""A timer that comes so much later than asked: the node stood still, and the ranks with it."""
_GRACE_S = 5.0
_PAUSED_S = 0.2


@dataclass(kw_only=True, eq=False)
class _Appointment:
    """What one rank is waited for."""

    kind: str
    worker: Worker
    record: CycleRecord
    since_ns: int
    timeout_s: float
    asked_ns: int = 0
    due_ns: int = 0
    excused_ns: int = 0


class Punctuality:
    """Waits for the ranks of one node, cycle after cycle. A timeout of None is none."""

    def __init__(
        self,
        *,
        startup_timeout_s: float | None,
        exit_timeout_s: float | None,
        first_signal: signal.Signals,
        observe_only: bool,
        pauses: Pauses,
        is_stopping: Callable[[], bool],
        reactor: Reactor,
        log: EventLog,
        say: Callable[[str], None],
        look_at: Callable[[int, int, bool], bool] = lambda _local_rank, _cycle, _ends: False,
    ) -> None:
        """``is_stopping``: the launcher was asked to stop, so that nobody need start any more.

        ``look_at`` (local rank, cycle, whether it is about to be ended) has evidence collected on a rank, which
        ``heard`` gets; False if nobody can.
        """
        self._look_at = look_at
        self._seen_soon: list[Worker] = []
        """Ranks that are ended when all that are ``_asked`` have been looked at."""
        self._asked: set[int] = set()
        self._timer: Timer | None = None
        self._startup_timeout_s = startup_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._first_signal = first_signal
        self._observe_only = observe_only
        self._pauses = pauses
        self._is_stopping = is_stopping
        self._reactor = reactor
        self._log = log
        self._say = say
        self._record: CycleRecord | None = None
        self._awaited: dict[int, _Appointment] = {}

    def begin(self, record: CycleRecord) -> None:
        """The ranks of a cycle have been started."""
        self._record = record
        self._awaited.clear()
        self._seen_soon.clear()
        self._forget_asked()
        if self._startup_timeout_s is not None:
            for local_rank, worker in record.workers.items():
                self._await("startup", local_rank, worker.started_at_ns, self._startup_timeout_s)

    def heard(self, local_rank: int, report: Attached | Detached | Seen) -> None:
        """Something a monitor said."""
        record = self._record
        if record is None or report.cycle != record.cycle or local_rank not in record.workers:
            return
        if isinstance(report, Seen) and local_rank in self._asked:
            if report.note.frame:
                record.places[record.global_ranks[local_rank]] = f"in {report.note.frame}"
            self._asked.discard(local_rank)
            if not self._asked:
                self._end_seen()
        elif isinstance(report, Attached):
            self._awaited.pop(local_rank, None)  # also one that was at its end and begins again
        elif isinstance(report, Detached) and self._exit_timeout_s is not None:
            if local_rank not in self._awaited:  # a monitor that replaces another says it again
                self._await("exit", local_rank, report.at_ns or time.monotonic_ns(), self._exit_timeout_s)

    def stood_still(self) -> None:
        """The launcher was stopped and continued, and so were its ranks, if somebody did that to the whole node.

        It may have been at any moment since each was last looked at: none of that time counts. A timer that comes
        late tells the same, but a stop that is over before the timer is due delays nothing.
        """
        now = time.monotonic_ns()
        for appointment in self._awaited.values():
            self._excuse(appointment, now)
            appointment.asked_ns = now

    def _await(self, kind: str, local_rank: int, since_ns: int, timeout_s: float) -> None:
        assert self._record is not None
        worker = self._record.workers[local_rank]
        appointment = _Appointment(
            kind=kind, worker=worker, record=self._record, since_ns=since_ns, timeout_s=timeout_s
        )
        self._awaited[local_rank] = appointment
        self._look_in(appointment, timeout_s - (time.monotonic_ns() - since_ns) / 1e9)

    def _look_in(self, appointment: _Appointment, delay_s: float) -> None:
        appointment.asked_ns = time.monotonic_ns()
        appointment.due_ns = appointment.asked_ns + round(delay_s * 1e9)
        self._reactor.call_later(delay_s, lambda: self._look(appointment))

    def _look(self, appointment: _Appointment) -> None:
        local_rank = appointment.worker.local_rank
        if self._awaited.get(local_rank) is not appointment or appointment.worker.look():
            return  # it came, or it has ended
        if self._pauses.since_ns is not None:
            self._look_in(appointment, _PAUSED_S)
            return
        now = time.monotonic_ns()
        if now - appointment.due_ns > _LATE_NS:
            self._excuse(appointment, now)
        paused_ns = self._pauses.within(appointment.since_ns, now)
        elapsed_s = (now - appointment.since_ns - paused_ns - appointment.excused_ns) / 1e9
        if elapsed_s < appointment.timeout_s:
            self._look_in(appointment, appointment.timeout_s - elapsed_s)
            return
        del self._awaited[local_rank]
        if appointment.kind == "exit" or not self._is_stopping():
            self._is_late(appointment, elapsed_s, now)

    def _excuse(self, appointment: _Appointment, now_ns: int) -> None:
        """It may have stood still at any moment since it was last looked at. What was paused is taken off anyway."""
        asked_ns = appointment.asked_ns
        appointment.excused_ns += now_ns - asked_ns - self._pauses.within(asked_ns, now_ns)

    def _is_late(self, appointment: _Appointment, elapsed_s: float, now_ns: int) -> None:
        worker, record = appointment.worker, appointment.record
        verdict = HangVerdict(
            rank=record.global_ranks[worker.local_rank],
            local_rank=worker.local_rank,
            kind=appointment.kind,
            section=None,
            elapsed_s=elapsed_s,
            timeout_s=appointment.timeout_s,
            iteration=record.iteration_of(worker.local_rank),
            at_ns=now_ns,
            stopped=process_tree.is_stopped(worker.pid),
        )
        self._write(verdict, appointment)
        if self._observe_only:
            self._say(lines.observed(verdict))
            return
        if appointment.kind == "exit" and record.only_exits_are_missing():
            record.finished_late(worker.local_rank)
            self._say(lines.finished_late(verdict))
        else:
            record.found_hung(verdict)
            self._blame(verdict, appointment)
        if not self._ask(worker.local_rank, ends=True):
            self._end(worker)
            return
        self._seen_soon.append(worker)
        if self._timer is None:
            self._timer = self._reactor.call_later(LOOK_S, self._end_seen)

    def _ask(self, local_rank: int, *, ends: bool) -> bool:
        """Have evidence collected on a rank, once; False if nobody can. ``ends``: it is about to be ended."""
        assert self._record is not None
        if local_rank not in self._asked and self._look_at(local_rank, self._record.cycle, ends):
            self._asked.add(local_rank)
        return local_rank in self._asked

    def _blame(self, verdict: HangVerdict, late: _Appointment) -> None:
        """Accuse nobody who may only wait for another one: no board tells them apart. One that is stopped is it."""
        awaited = [each.worker for each in self._awaited.values() if each.kind == late.kind]
        others = [worker for worker in awaited if not worker.look()]
        if not others or late.record.suspects is not None:
            return
        suspects = [late.worker, *others]
        stopped = [worker for worker in suspects if process_tree.is_stopped(worker.pid)]
        if len(stopped) == 1:
            suspects = stopped
        late.record.suspects = (verdict, [worker.local_rank for worker in suspects])
        for worker in others:
            self._ask(worker.local_rank, ends=False)

    def _end_seen(self) -> None:
        """Everybody has been looked at, or the time for that is over."""
        self._forget_asked()
        while self._seen_soon:
            worker = self._seen_soon.pop()
            if not worker.look():
                self._end(worker)

    def _forget_asked(self) -> None:
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, verdict: HangVerdict, appointment: _Appointment) -> None:
        record = Verdict(
            rank=verdict.rank,
            local_rank=verdict.local_rank,
            cycle=appointment.record.cycle,
            pid=appointment.worker.pid,
            kind=verdict.kind,
            since_ns=appointment.since_ns,
            elapsed_s=verdict.elapsed_s,
            timeout_s=verdict.timeout_s,
            iteration=verdict.iteration,
            observed_only=self._observe_only,
            at_ns=verdict.at_ns,
            text=describe_hang(verdict),
        )
        self._log.write(record)

    def _end(self, worker: Worker) -> None:
        """As its monitor would: the rank alone, SIGKILL after a grace."""
        grace = Grace(time.monotonic() + _GRACE_S, run_delays_ns(worker.pid))
        worker.signal(self._first_signal, whole_group=False)  # the main thread finds it when SIGCONT lets it go on
        worker.signal(signal.SIGCONT, whole_group=False)
        worker.signals_sent.discard(signal.SIGCONT)  # nobody ends of that

        def insist() -> None:
            if worker.look():
                return
            now = time.monotonic()
            if grace.is_over(now, run_delays_ns(worker.pid)):
                worker.signal(signal.SIGKILL, whole_group=False)
            else:
                self._reactor.call_later(grace.due_s - now, insist)

        self._reactor.call_later(_GRACE_S, insist)
