"""Cycles of a run: how each ended, which rank caused that, and how long until training continued. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.cli.logs.runs import RunLogs, split_runs
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import (
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    RankExited,
    RunEnded,
    SnapshotRestored,
)
from megatron_ft.core.facts.monitor import Attached, FirstIteration, FirstStep
from megatron_ft.core.facts.rank import FaultInjected
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.facts.timed import Timed
from megatron_ft.core.hosts import natural

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, kw_only=True)
class LoggedFault:
    """A fault injected by a plan or a simulation; None is unknown."""

    type: str | None
    rank: int | None
    iteration: int | None
    at_ns: int


@dataclass(frozen=True, kw_only=True)
class RestartPhases:
    """Phases from a fault to training again, in seconds; None where the logs don't tell.

    Args:
        notice: from the fault to its detection.
        stop: until the ranks were gone and the cycle was over.
        rendezvous: until all nodes of the next cycle had met.
        spawn: until its ranks were created.
        user_code: until the last rank's script began; None for fresh interpreters, which don't report it.
        imports: until the last rank had connected to its monitor, with everything else its script did before: in
        Megatron's training scripts, the process group.
        setup: until the last rank began its first iteration, with the load of the checkpoint.
        first_step: until that iteration was over on all ranks.
    """

    notice: float | None = None
    stop: float | None = None
    rendezvous: float | None = None
    spawn: float | None = None
    user_code: float | None = None
    imports: float | None = None
    setup: float | None = None
    first_step: float | None = None


@dataclass(frozen=True, kw_only=True)
class CycleSummary:
    """One cycle of a run.

    Args:
        begin_ns, end_ns: wall ns; the end is that of the launcher that knows the cause best, None if no log has it.
        outcome: "succeeded", "failed" or "stopped"; "unknown" if its end isn't in the logs (it may still run).
        kind: kind of the cause: "hang", "crash", "signal", "request", "membership"; None if nothing failed.
        text: the cause as printed by the launcher; detail: details of the evidence, None without any.
        rank: rank at fault; None if none is, or if unknown.
        iteration: iteration of that rank at that time.
        first_iteration, last_iteration: of the whole cycle; None if no iteration began in it.
        noticed_after_s: from the fault to the verdict or the noticed exit. The fault is the injected one; else,
            for a hang, the moment from which the overdue section was open; else unknown.
        training_again_after_s: from the fault (if that is unknown: from its notice) until every rank had begun
            an iteration in a later cycle.
        iterations_redone: finished in this cycle and run again in that later one.
        restarts_left: for the next cycle, once this one has ended on a node; else as it began.
        restored: iteration that its ranks have restored from memory; None if they haven't.
        restored_redone: iterations from there to the end of the cycle before; None if unknown.
    """

    cycle: int
    begin_ns: int
    end_ns: int | None
    outcome: str
    kind: str | None = None
    text: str | None = None
    detail: str | None = None
    rank: int | None = None
    iteration: int | None = None
    first_iteration: int | None = None
    last_iteration: int | None = None
    fault: LoggedFault | None = None
    noticed_after_s: float | None = None
    training_again_after_s: float | None = None
    iterations_redone: int | None = None
    phases: RestartPhases = RestartPhases()
    restarts_left: int | None = None
    restored: int | None = None
    restored_redone: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a job.

    Args:
        opened_wall_ns: when its first log was opened, nanoseconds since the epoch.
        exit_code: of the launcher (the largest, if nodes differ); None if it isn't in the logs.
        passed_over: lines of its logs that couldn't be read.
        missing_ranks: of the last cycle, those whose launchers' logs aren't here.
        max_restarts: as configured.
    """

    run_id: str
    opened_wall_ns: int
    hosts: tuple[str, ...]
    world_size: int | None
    exit_code: int | None
    cycles: tuple[CycleSummary, ...]
    passed_over: int
    missing_ranks: tuple[int, ...] = ()
    max_restarts: int | None = None

    @property
    def restarts(self) -> int:
        """Number of restarts of the ranks."""
        return max(0, len(self.cycles) - 1)

    @property
    def restores(self) -> list[CycleSummary]:
        """Cycles whose ranks have restored their state from memory."""
        return [cycle for cycle in self.cycles if cycle.restored is not None]


def summarize(files: Sequence[EventLogFile]) -> list[RunSummary]:
    """Return all runs in these logs, oldest first."""
    return [summarize_run(run) for run in split_runs(files)]


def summarize_run(run: RunLogs) -> RunSummary:
    """Summarize one run, cycle by cycle."""
    records = run.records
    of_cycle = _by_cycle(records)
    exit_codes = [each.record.exit_code for each in records if isinstance(each.record, RunEnded)]
    started = [each.record for each in records if isinstance(each.record, CycleStarted)]
    return RunSummary(
        run_id=run.run_id,
        opened_wall_ns=run.opened_wall_ns,
        hosts=tuple(sorted({log.host for log in run.files}, key=natural)),
        world_size=next((each.world_size for each in reversed(started) if each.world_size is not None), None),
        exit_code=max((code for code in exit_codes if code is not None), default=None),
        cycles=_summaries([_Cycle(number, of_cycle[number]) for number in sorted(of_cycle)]),
        passed_over=sum(log.passed_over for log in run.files),
        missing_ranks=_missing_ranks(started),
        max_restarts=next((each.max_restarts for each in started), None),
    )


def _missing_ranks(started: Sequence[CycleStarted]) -> tuple[int, ...]:
    last = max((record.cycle for record in started), default=-1)
    of_last = [record for record in started if record.cycle == last]
    size = max((record.world_size or 0 for record in of_last), default=0)
    here = {rank.rank for record in of_last for rank in record.ranks}
    return tuple(rank for rank in range(size) if rank not in here) if here else ()


def _summaries(cycles: Sequence[_Cycle]) -> tuple[CycleSummary, ...]:
    """Summarize backwards: each cycle needs the next one, and the next one that trained."""
    following = resumed = None
    found = []
    for cycle in reversed(cycles):
        found.append(cycle.summary(following, resumed))
        following = cycle
        resumed = resumed if cycle.all_training_ns is None else cycle
    return tuple(reversed(found))


def _by_cycle(records: Iterable[Timed[Record | None]]) -> dict[int, list[Timed[Record | None]]]:
    found: dict[int, list[Timed[Record | None]]] = {}
    for each in records:
        cycle = getattr(each.record, "cycle", None)
        if cycle is not None:
            found.setdefault(cycle, []).append(each)
    return found


class _Cycle:
    """Records of one cycle, with all times in wall ns."""

    def __init__(self, number: int, records: Sequence[Timed[Record | None]]) -> None:
        self.number = number
        self._records = records
        self._by_kind: dict[type, list[Timed[Any]]] = {}
        for each in records:
            self._by_kind.setdefault(type(each.record), []).append(each)
        started = [each.at_ns for each in self._of(CycleStarted)]
        self.begin_ns = min(started or [each.at_ns for each in records])
        self.started_ns = max(started, default=None)
        self.met_ns = self._last(CycleStarted, lambda record: record.met_ns)
        self.spawned_ns = self._last(CycleStarted, lambda record: record.spawned_ns)
        self.attached_ns = max((each.at_ns for each in self._of(Attached)), default=None)
        end = min(self._of(CycleEnded), key=_importance, default=None)
        self.ended_ns = None if end is None else end.at_ns
        self._end = None if end is None else end.record

    def _of(self, kind: type[_R]) -> list[Timed[_R]]:
        return self._by_kind.get(kind, [])

    def _last(self, kind: type[_R], moment_of: Callable[[_R], int | None]) -> int | None:
        """Return the last moment (wall ns) in records of this kind; None without one."""
        told = ((each, moment_of(each.record)) for each in self._of(kind))
        return max((each.wall_ns(moment) for each, moment in told if moment is not None), default=None)

    def summary(self, following: _Cycle | None, resumed: _Cycle | None) -> CycleSummary:
        """Summarize the cycle; ``following`` is the next one, ``resumed`` the next one in which all ranks trained."""
        outcome = "unknown" if self._end is None else self._end.outcome
        told = None if self._end is None else self._end.cause
        cause, failed = told or Cause(), told is not None or outcome == "failed"
        fault = self._fault()
        noticed_ns = self._noticed_ns() if failed else None
        fault_ns = None
        if failed and fault is not None and (noticed_ns is None or fault.at_ns <= noticed_ns):
            fault_ns = fault.at_ns
        elif failed:
            fault_ns = next((each.wall_ns(each.record.since_ns) for each in self._verdicts()), None)
        origin_ns = noticed_ns if fault_ns is None else fault_ns
        again_ns = None if resumed is None else resumed.all_training_ns
        restored = next((each.record for each in self._of(SnapshotRestored)), None)
        return CycleSummary(
            cycle=self.number,
            begin_ns=self.begin_ns,
            end_ns=self.ended_ns,
            outcome=outcome,
            kind=None if told is None else cause.kind.value,
            text=None if told is None else cause.text,
            detail=cause.detail or None,
            rank=cause.rank,
            iteration=None if self._end is None else self._end.iteration,
            first_iteration=self.first_iteration(),
            last_iteration=self._last_iteration(),
            fault=fault,
            noticed_after_s=_seconds(fault_ns, noticed_ns),
            training_again_after_s=_seconds(origin_ns, again_ns),
            iterations_redone=self._redone(resumed),
            phases=self._phases(fault_ns, noticed_ns, following),
            restarts_left=self._restarts_left(),
            restored=None if restored is None else restored.key.iteration,
            restored_redone=None if restored is None else restored.redone,
        )

    def _phases(self, fault_ns: int | None, noticed_ns: int | None, following: _Cycle | None) -> RestartPhases:
        notice, stop = _seconds(fault_ns, noticed_ns), _seconds(noticed_ns, self.ended_ns)
        if following is None:
            return RestartPhases(notice=notice, stop=stop)
        began_ns = following.user_code_ns()
        created_ns = following.spawned_ns or following.started_ns
        return RestartPhases(
            notice=notice,
            stop=stop,
            rendezvous=_seconds(self.ended_ns, following.met_ns),
            spawn=_seconds(following.met_ns or self.ended_ns, created_ns),
            user_code=_seconds(created_ns, began_ns),
            imports=_seconds(began_ns or created_ns, following.attached_ns),
            setup=_seconds(following.attached_ns, following.all_training_ns),
            first_step=_seconds(following.all_training_ns, following.first_step_ns()),
        )

    def user_code_ns(self) -> int | None:
        """Return when the last rank's script began."""
        return self._last(Attached, lambda record: record.user_code_ns)

    def first_step_ns(self) -> int | None:
        """Return when the last rank was through its first iteration; None if not all ranks were."""
        ended = {each.record.rank: each.wall_ns(each.record.at_ns) for each in self._of(FirstStep)}
        return max(ended.values()) if ended and ended.keys() >= self._ranks() else None

    def first_iteration(self) -> int | None:
        return min((each.record.iteration for each in self._of(FirstIteration)), default=None)

    @cached_property
    def all_training_ns(self) -> int | None:
        """Time at which the last rank began its first iteration; None if not all ranks did."""
        begun = {each.record.rank: each.wall_ns(each.record.at_ns) for each in self._of(FirstIteration)}
        return max(begun.values()) if begun and begun.keys() >= self._ranks() else None

    def _ranks(self) -> set[int]:
        """Return all ranks of the cycle that the logs mention."""
        started = (rank.rank for each in self._of(CycleStarted) for rank in each.record.ranks)
        return {*started, *(each.record.rank for each in self._of(Attached))}

    def _last_iteration(self) -> int | None:
        told = (getattr(each.record, "iteration", None) for each in self._records)
        return max((iteration for iteration in told if iteration is not None), default=None)

    def _restarts_left(self) -> int | None:
        ended = [each.record.restarts_left for each in self._of(CycleEnded)]
        started = [each.record.restarts_left for each in self._of(CycleStarted)]
        return min((left for left in ended if left is not None), default=next(iter(started), None))

    def _fault(self) -> LoggedFault | None:
        for each in self._of(FaultInjected):
            of = each.record
            return LoggedFault(type=of.type, rank=of.rank, iteration=of.iteration, at_ns=each.at_ns)
        return None

    def _noticed_ns(self) -> int | None:
        """Return the time of the first verdict, or of the first exit not caused by launcher or monitor."""
        moments = [each.wall_ns(each.record.at_ns) for each in self._verdicts()]
        for each in self._of(RankExited):
            if not each.record.by_us and each.record.exitcode != 0:
                moments.append(each.at_ns)
        return min(moments, default=self.ended_ns)

    def _verdicts(self) -> list[Timed[RankHung]]:
        """Return the verdicts that had consequences."""
        return [each for each in self._of(RankHung) if not each.record.observed_only]

    def _redone(self, resumed: _Cycle | None) -> int | None:
        last, first = self._last_iteration(), resumed.first_iteration() if resumed is not None else None
        if last is None or first is None:
            return None
        # iteration n is reported as it begins: the current one, `last`, wasn't completed
        return max(0, last - first)


def _importance(ended: Timed[CycleEnded]) -> tuple[bool, bool, int]:
    """Return a sort key for the ends recorded for one cycle: one that knows the cause comes first."""
    cause = ended.record.cause
    return cause is None, cause is not None and cause.kind is CauseKind.MEMBERSHIP, ended.at_ns


def _seconds(begin_ns: int | None, end_ns: int | None) -> float | None:
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9
