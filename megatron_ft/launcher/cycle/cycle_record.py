"""What happened in one cycle on this node, collected as it happens, and the cause found in it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing import ProcessFailure

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.diagnosis.exceptions import LastWords
from megatron_ft.core.diagnosis.exits import (
    Cause,
    CauseKind,
    HangVerdict,
    RankExit,
    RankView,
    describe_exit,
    find_cause,
    find_culprit,
    hang_of_one,
    is_by_us,
)
from megatron_ft.core.grace import Grace
from megatron_ft.core.job.progress import Reached
from megatron_ft.core.messages.monitor import Report
from megatron_ft.core.records.launcher import RankExited
from megatron_ft.core.records.monitor import Attached, FirstStep, Signalled
from megatron_ft.core.records.shared import Verdict, Warning_
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux.proc import run_delays_ns
from megatron_ft.launcher.base import logs
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.monitors.reports import hang_verdict
from megatron_ft.launcher.processes import process_tree
from megatron_ft.launcher.processes.worker import Worker

__all__ = ["CycleRecord"]

_HUNG_AND_ALIVE_S = 20.0
"""After a verdict the monitor signals, and kills after a grace of 5 s; then its rank should be gone."""


class CycleRecord:
    """Facts of one cycle. ``snapshot`` reads a local rank's board, None if it has none."""

    def __init__(
        self,
        cycle: int,
        global_ranks: list[int],
        *,
        snapshot: Callable[[int], BoardSnapshot | None],
        log: EventLog,
        last_words: Callable[[int], LastWords] = lambda _local_rank: LastWords(),
        checkpointed: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``checkpointed`` says the iteration of the last checkpoint, where a file holds it."""
        self.cycle = cycle
        self.met_ns = time.monotonic_ns()
        """When the nodes had met, which is when a record begins."""
        self.global_ranks = global_ranks
        """By local rank."""
        self.exits: dict[int, RankExit] = {}
        """By local rank."""
        self.hung: dict[int, Grace] = {}
        """Local ranks that were found hung (failed, however they end), and when they should be gone."""
        self.workers: dict[int, Worker] = {}
        self._finished_late: set[int] = set()
        self._began_ns: list[int] = []
        self._attached_ns: dict[int, int] = {}
        self._has_group = False
        """Ranks had set their process group up before they were attached."""
        self._first_step_ns: dict[int, tuple[int, int]] = {}
        """By local rank, when its first step began and ended."""
        self.error_files: dict[int, str] = {}
        self.stderrs: dict[int, str] = {}
        """Where standard error goes, of those that don't have the launcher's."""
        self.shutdown_request: ReceivedRequest | None = None
        self.exclude_request: ReceivedRequest | None = None
        self.found: Cause | None = None
        """Who hangs, once all ranks have been looked at; None as long as, or where, that isn't known."""
        self.suspects: tuple[HangVerdict, list[int]] | None = None
        """What the launcher itself found first, and the local ranks of which one hangs, where it isn't just that."""
        self.places: dict[int, str] = {}
        """Where ranks were that the launcher itself found hung, in words, by global rank."""
        self._verdicts: list[HangVerdict] = []
        self._snapshot = snapshot
        self._log = log
        self._last_words = last_words
        self._checkpointed = checkpointed

    def ended(self, worker: Worker) -> None:
        """A rank has ended."""
        assert worker.exitcode is not None
        local_rank = worker.local_rank
        snapshot = self._snapshot(local_rank)
        if snapshot is not None and snapshot.first_step_at_ns:  # its monitor may not have looked since
            step_ns = snapshot.first_iteration_at_ns, snapshot.first_step_at_ns
            self._first_step_ns.setdefault(local_rank, step_ns)
        words = self._last_words(local_rank)
        signals_sent = set(worker.signals_sent)
        if local_rank in self.hung and worker.exitcode < 0:
            # its monitor signals right after the verdict, and tells of it when the rank may have ended already
            signals_sent.add(-worker.exitcode)
        rank_exit = RankExit(
            rank=self.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            exitcode=worker.exitcode,
            at_ns=worker.exited_at_ns,
            signals_sent=frozenset(signals_sent),
            signalled_at_ns=worker.signalled_at_ns,
            iteration=None if snapshot is None else snapshot.iteration,
            error=words.error or None,
            error_at_s=words.raised_at_s,
            raised_at_ns=words.raised_at_ns,
            where=words.where,
        )
        self.exits[local_rank] = rank_exit
        exited = RankExited(
            cycle=self.cycle,
            rank=rank_exit.rank,
            local_rank=local_rank,
            pid=rank_exit.pid,
            exitcode=rank_exit.exitcode,
            signal=-rank_exit.exitcode if rank_exit.exitcode < 0 else None,
            by_us=is_by_us(rank_exit),
            iteration=rank_exit.iteration,
            error=rank_exit.error,
        )
        self._log.write(exited, t=rank_exit.at_ns)

    def told_by_monitor(self, local_rank: int, report: Report) -> None:
        """Something a monitor said."""
        worker = self.workers.get(local_rank)
        if isinstance(report, Signalled) and worker is not None and worker.exitcode is None:
            number = signal.Signals.__members__.get(report.signal)
            if number is not None and number != signal.SIGCONT:
                worker.signals_sent.add(number)
        elif isinstance(report, Warning_) or report.cycle != self.cycle:
            return
        elif isinstance(report, Attached):
            self._attached(local_rank, report)
        elif isinstance(report, FirstStep):
            self._first_step_ns[local_rank] = report.began_ns or 0, report.at_ns
        elif isinstance(report, Verdict) and local_rank not in self.hung:
            self._should_end(local_rank)
            self._verdicts.append(find_culprit(self._verdict(local_rank, report), self._views()))

    @property
    def spawned_ns(self) -> int | None:
        """When the last rank was created."""
        return max((worker.started_at_ns for worker in self.workers.values()), default=None)

    def phases_ns(self) -> dict[str, int] | None:
        """When each phase of the start was over (monotonic ns); None until all ranks here are through a step."""
        if not self.global_ranks or len(self._first_step_ns) < len(self.global_ranks):  # none: the nodes still meet
            return None
        moments = {"rendezvous": self.met_ns, "ranks created": self.spawned_ns or self.met_ns}
        if self._began_ns:
            moments["user code"] = max(self._began_ns)
        if len(self._attached_ns) == len(self.global_ranks):
            # the first that is known of a script; what it did before isn't told apart
            name = "imports and process group" if self._has_group else "imports"
            moments[name] = max(self._attached_ns.values())
        began_ns, ended_ns = zip(*self._first_step_ns.values(), strict=True)
        if all(began_ns):
            moments["set up"] = max(began_ns)
        return {**moments, "first step": max(ended_ns)}

    def _attached(self, local_rank: int, report: Attached) -> None:
        """A rank has connected to its monitor; a script may do so again after it has shut its monitoring down."""
        if local_rank in self._attached_ns or report.at_ns is None:
            return
        self._attached_ns[local_rank] = report.at_ns
        self._has_group = self._has_group or report.has_group
        if report.user_code_ns is not None:
            self._began_ns.append(report.user_code_ns)

    def noticed_ns(self) -> int:
        """When it was known that this cycle has failed; now, if no rank of this node has."""
        exits = [rank_exit.at_ns for local_rank, rank_exit in self.exits.items() if self.has_failed(local_rank)]
        return min([*exits, *(verdict.at_ns for verdict in self._verdicts)], default=time.monotonic_ns())

    def found_hung(self, verdict: HangVerdict) -> None:
        """A rank that the launcher itself found hung, in what its monitor can't see."""
        self._should_end(verdict.local_rank)
        self._verdicts.append(verdict)

    def finished_late(self, local_rank: int) -> None:
        """A rank that has finished, but had to be made to exit; however it ends now, it ends well."""
        self._finished_late.add(local_rank)

    def only_exits_are_missing(self) -> bool:
        """Whether ranks have exited with 0, none has failed, and all others have shut their monitoring down."""
        if not self.exits or any(map(self.has_failed, self.exits)) or not self.hung.keys() <= self.exits.keys():
            return False
        running = set(range(len(self.global_ranks))) - self.exits.keys()
        snapshots = [self._snapshot(local_rank) for local_rank in running]
        return all(snapshot is not None and snapshot.closing for snapshot in snapshots)

    def iteration_of(self, local_rank: int) -> int | None:
        """The iteration that a rank of this node reported last."""
        snapshot = self._snapshot(local_rank)
        return None if snapshot is None else snapshot.iteration

    def has_failed(self, local_rank: int) -> bool:
        """Whether this rank has ended otherwise than well."""
        rank_exit = self.exits.get(local_rank)
        if rank_exit is None or local_rank in self._finished_late:
            return False
        return rank_exit.exitcode != 0 or local_rank in self.hung

    def has_outlived_its_end(self) -> bool:
        """Whether a rank still lives that was found hung, and should have been ended by now."""
        now = time.monotonic()
        late = {lr for lr, grace in self.hung.items() if now >= grace.due_s} - self.exits.keys()
        return any(self.hung[lr].is_over(now, run_delays_ns(self.workers[lr].pid)) for lr in late)

    def _should_end(self, local_rank: int) -> None:
        if local_rank not in self.hung:
            run_delays = run_delays_ns(self.workers[local_rank].pid)
            self.hung[local_rank] = Grace(time.monotonic() + _HUNG_AND_ALIVE_S, run_delays)

    def all_ended_well(self) -> bool:
        """Whether every rank has ended with 0."""
        return len(self.exits) == len(self.global_ranks) and not any(map(self.has_failed, self.exits))

    def failures(self) -> list[str]:
        """How the ranks ended that didn't end well, in words."""
        return [describe_exit(rank_exit) for lr, rank_exit in self.exits.items() if self.has_failed(lr)]

    def cause(self) -> Cause:
        """Why it failed."""
        if self.found is not None:
            return self.found
        cause = find_cause(list(self.exits.values()), self._verdicts)
        if self.suspects is not None and (cause is None or cause.rank == self.suspects[0].rank):
            verdict, local_ranks = self.suspects
            ranks = sorted(self.global_ranks[local_rank] for local_rank in local_ranks)
            return hang_of_one(verdict, {rank: self.places.get(rank, "") for rank in ranks})
        if cause is not None and cause.kind is CauseKind.HANG and cause.rank in self.places:
            return dataclasses.replace(cause, detail=self.places[cause.rank])
        return cause or Cause(kind=CauseKind.CRASH, text="no rank of this node has ended, and none could be ended")

    def own_failure(self) -> Cause | None:
        """Of a rank of this node that failed by itself, if one did, and not only because it had lost another.

        One that ends of an exception counts, even if that takes it so long that it hasn't ended yet.
        """
        running = [worker for worker in self.workers.values() if worker.local_rank not in self.exits]
        ends = [*self.exits.values(), *filter(None, map(self._end_of_its_exception, running))]
        own = None if self.hung else find_cause(ends, [])
        return own if own is not None and not (own.follows or own.by_us) else None

    def _end_of_its_exception(self, worker: Worker) -> RankExit | None:
        """What the end of a rank will be that has raised and not gone on; None of one that isn't ending of that."""
        local_rank, words = worker.local_rank, self._last_words(worker.local_rank)
        snapshot = self._snapshot(local_rank)
        moved_ns = 0 if snapshot is None else max(snapshot.last_transition_ns, snapshot.last_heartbeat_ns)
        # not every exception that is printed ends a process
        if not words.error or not words.raised_at_ns or words.raised_at_ns < moved_ns:
            return None
        return RankExit(
            rank=self.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            exitcode=1,
            at_ns=words.raised_at_ns,
            iteration=None if snapshot is None else snapshot.iteration,
            error=words.error,
            error_at_s=words.raised_at_s,
            raised_at_ns=words.raised_at_ns,
            where=words.where,
        )

    def request_cause(self) -> Cause:
        """The request of a rank of this node that ended it, as a cause."""
        request = self.shutdown_request or self.exclude_request
        assert request is not None
        return Cause(kind=CauseKind.REQUEST, text=request.text, rank=request.rank)

    def last_iteration(self) -> int | None:
        """The furthest iteration that a rank of this node reported."""
        snapshots = map(self._snapshot, range(len(self.global_ranks)))
        return max((s.iteration for s in snapshots if s is not None and s.iteration is not None), default=None)

    def reached(self) -> Reached:
        """How far all ranks of this node got that told an iteration."""
        snapshots = [s for s in map(self._snapshot, range(len(self.global_ranks))) if s is not None]
        # the one that is behind: the others may have gone on for a moment after a rank had failed
        known = [(s.first_iteration, s.iteration) for s in snapshots if s.first_iteration is not None]
        saved = None if known else self._checkpointed()
        if saved is not None:
            return Reached(first=saved, last=saved)
        first = min((first for first, _ in known), default=-1)
        return Reached(first=first, last=min((-1 if last is None else last for _, last in known), default=-1))

    def torch_failures(self, cause: Cause) -> dict[int, ProcessFailure]:
        """The same for torch's report, which takes the one with the earliest time for the root cause."""
        failed = [rank_exit for rank_exit in self.exits.values() if self.has_failed(rank_exit.local_rank)]
        failed.sort(key=lambda rank_exit: (rank_exit.rank != cause.rank, rank_exit.at_ns))
        failures: dict[int, ProcessFailure] = {}
        earliest = 0
        for rank_exit in failed:
            failure = _process_failure(rank_exit, self.error_files.get(rank_exit.local_rank, ""))
            earliest = earliest or failure.timestamp
            failure.timestamp = max(earliest, failure.timestamp)
            failures[rank_exit.rank] = failure
        return failures

    def _verdict(self, local_rank: int, report: Verdict) -> HangVerdict:
        return dataclasses.replace(hang_verdict(report, local_rank=local_rank), rank=self.global_ranks[local_rank])

    def _views(self) -> list[RankView]:
        views = (self._view(local_rank) for local_rank in range(len(self.global_ranks)))
        return [view for view in views if view is not None]

    def _view(self, local_rank: int) -> RankView | None:
        snapshot, worker = self._snapshot(local_rank), self.workers.get(local_rank)
        if snapshot is None or worker is None or worker.exitcode is not None:
            return None
        section = snapshot.open_sections[0] if snapshot.open_sections else None
        timeout_ns = snapshot.out_of_section_timeout_ns if section is None else section.timeout_ns
        return RankView(
            rank=self.global_ranks[local_rank],
            local_rank=local_rank,
            # one that hangs may have been stopped by its monitor
            stopped=local_rank not in self.hung and process_tree.is_stopped(worker.pid),
            iteration=snapshot.iteration,
            section=None if section is None else section.name,
            since_ns=snapshot.last_transition_ns if section is None else section.opened_at_ns,
            timeout_s=None if timeout_ns is None else timeout_ns / 1e9,
            closing=snapshot.closing,
        )


def _process_failure(rank_exit: RankExit, error_file: str) -> ProcessFailure:
    try:
        failure = logs.call(lambda: _failure_of(rank_exit, error_file), None)
    except Exception:  # noqa: BLE001 - torch raises whatever a half-written file makes it raise
        failure = None
    failure = failure or _failure_of(rank_exit, "")
    if rank_exit.exitcode == 0:
        failure.message = "ended with 0, but its monitor had found it hung"
    return failure


def _failure_of(rank_exit: RankExit, error_file: str) -> ProcessFailure:
    failure = ProcessFailure(
        local_rank=rank_exit.local_rank,
        pid=rank_exit.pid,
        exitcode=rank_exit.exitcode,
        error_file=error_file,
    )
    if not failure.timestamp or not os.path.isfile(error_file):
        failure.timestamp = round(time.time() - (time.monotonic_ns() - rank_exit.at_ns) / 1e9)
    return failure
