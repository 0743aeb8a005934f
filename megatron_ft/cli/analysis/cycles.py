"""What happened in each cycle of a run: how it ended, who did it, and how long until training went on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.cli.logs.runs import RunLogs, TimedRecord, split_runs

__all__ = [
    "CycleSummary",
    "InjectedFault",
    "RestartPhases",
    "RunSummary",
    "summarize",
    "summarize_run",
]


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault that a plan or a simulation caused; None is what isn't known."""

    type: str | None
    rank: int | None
    iteration: int | None
    at_ns: int


@dataclass(frozen=True, kw_only=True)
class RestartPhases:
    """Where the time from a fault to training again went, in seconds; None where the logs don't tell.

    Args:
        notice: from the fault to the moment it was noticed.
        stop: until the ranks were gone and the cycle was over.
        rendezvous: until all nodes of the next cycle had met.
        spawn: until its ranks were created.
        user_code: until the last rank's script began; None for fresh interpreters, which don't tell.
        imports: until the last rank had connected to its monitor. What else its script did before is in it, too: in
            Megatron's training scripts, the process group.
        setup: until the last rank began its first iteration: the load of the checkpoint is in it.
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
    """One life of the worker group.

    Args:
        begin_ns, end_ns: wall ns; the end is that of the launcher that knows the cause best, None if no log has it.
        outcome: "succeeded", "failed" or "stopped"; "unknown" if its end isn't in the logs (it may still run).
        kind: of the cause: "hang", "crash", "signal", "request", "membership"; None if nothing failed.
        text: the cause in words, as the launcher printed it; detail: what the evidence added, None if nothing.
        rank: who caused the end; None if unknown or nobody.
        iteration: of that rank at that time.
        first_iteration, last_iteration: of the whole cycle; None if no iteration began in it.
        noticed_after_s: from the fault to the verdict or the noticed exit. The fault is the injected one; else,
            for a hang, the moment from which the overdue section was open; else unknown.
        training_again_after_s: from the fault (if that is unknown: from its notice) until every rank had begun
            an iteration in a later cycle.
        iterations_redone: finished in this cycle and run again in that later one.
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
    fault: InjectedFault | None = None
    noticed_after_s: float | None = None
    training_again_after_s: float | None = None
    iterations_redone: int | None = None
    phases: RestartPhases = RestartPhases()


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a job.

    Args:
        opened_wall_ns: when its first log was opened, nanoseconds since the epoch.
        exit_code: of the launcher (the largest, if nodes differ); None if it isn't in the logs.
        passed_over: lines of its logs that couldn't be read.
    """

    run_id: str
    opened_wall_ns: int
    hosts: tuple[str, ...]
    world_size: int | None
    exit_code: int | None
    cycles: tuple[CycleSummary, ...]
    passed_over: int

    @property
    def restarts(self) -> int:
        """How often the ranks were started again."""
        return max(0, len(self.cycles) - 1)


def summarize(files: Sequence[EventLogFile]) -> list[RunSummary]:
    """All runs in these logs, oldest first."""
    return [summarize_run(run) for run in split_runs(files)]


def summarize_run(run: RunLogs) -> RunSummary:
    """One run, cycle by cycle."""
    records = run.records
    of_cycle = _by_cycle(records)
    exit_codes = [record.get("exit_code") for _, record in records if record.ev == "run_ended"]
    sizes = [record.get("world_size") for _, record in records if record.ev == "cycle_started"]
    return RunSummary(
        run_id=run.run_id,
        opened_wall_ns=run.opened_wall_ns,
        hosts=tuple(sorted({log.host for log in run.files})),
        world_size=next((size for size in reversed(sizes) if size is not None), None),
        exit_code=max((code for code in exit_codes if code is not None), default=None),
        cycles=_summaries([_Cycle(number, of_cycle[number]) for number in sorted(of_cycle)]),
        passed_over=sum(log.passed_over for log in run.files),
    )


def _summaries(cycles: Sequence[_Cycle]) -> tuple[CycleSummary, ...]:
    """From the last one back: each needs to know which cycle was the next, and which the next that trained."""
    following = resumed = None
    found = []
    for cycle in reversed(cycles):
        found.append(cycle.summary(following, resumed))
        following = cycle
        resumed = resumed if cycle.all_training_ns is None else cycle
    return tuple(reversed(found))


def _by_cycle(records: Iterable[TimedRecord]) -> dict[int, list[TimedRecord]]:
    found: dict[int, list[TimedRecord]] = {}
    for at, record in records:
        cycle = record.get("cycle")
        if cycle is not None:
            found.setdefault(cycle, []).append((at, record))
    return found


class _Cycle:
    """The records of one cycle, and what they say about it. All times are wall ns."""

    def __init__(self, number: int, records: Iterable[TimedRecord]) -> None:
        self.number = number
        self._records = list(records)
        self._by_event: dict[str, list[TimedRecord]] = {}
        for at, record in self._records:
            self._by_event.setdefault(record.ev, []).append((at, record))
        started = [at for at, _ in self._of("cycle_started")]
        self.begin_ns = min(started or [at for at, _ in self._records])
        self.started_ns = max(started, default=None)
        self.met_ns = max((moment for moment, _ in self._moments("cycle_started", "met_ns")), default=None)
        self.spawned_ns = max((moment for moment, _ in self._moments("cycle_started", "spawned_ns")), default=None)
        self.attached_ns = max((at for at, _ in self._of("attached")), default=None)
        end = min(self._of("cycle_ended"), key=_importance, default=None)
        self.ended_ns = None if end is None else end[0]
        self._end = None if end is None else end[1]

    def _of(self, ev: str) -> list[TimedRecord]:
        return self._by_event.get(ev, [])

    def _moments(self, ev: str, name: str) -> list[TimedRecord]:
        """Records of this name, each with the moment that its field ``name`` (monotonic ns) tells."""
        return [
            (at - record.t + record.get(name), record) for at, record in self._of(ev) if record.get(name) is not None
        ]

    def summary(self, following: _Cycle | None, resumed: _Cycle | None) -> CycleSummary:
        """``following`` is the next cycle, ``resumed`` the next one in which all ranks trained."""
        outcome = "unknown" if self._end is None else self._end.get("outcome") or "unknown"
        cause = (self._end.get("cause") if self._end is not None else None) or {}
        failed = bool(cause) or outcome == "failed"
        fault = self._fault()
        noticed_ns = self._noticed_ns() if failed else None
        fault_ns = self._fault_ns(fault, noticed_ns) if failed else None
        origin_ns = noticed_ns if fault_ns is None else fault_ns
        again_ns = None if resumed is None else resumed.all_training_ns
        return CycleSummary(
            cycle=self.number,
            begin_ns=self.begin_ns,
            end_ns=self.ended_ns,
            outcome=outcome,
            kind=cause.get("kind"),
            text=cause.get("text"),
            detail=cause.get("detail") or None,
            rank=cause.get("rank"),
            iteration=self._end.get("iteration") if self._end is not None else None,
            first_iteration=self.first_iteration(),
            last_iteration=self._last_iteration(),
            fault=fault,
            noticed_after_s=_seconds(fault_ns, noticed_ns),
            training_again_after_s=_seconds(origin_ns, again_ns),
            iterations_redone=self._redone(resumed),
            phases=self._phases(fault_ns, noticed_ns, following),
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
        """When the last rank's script began."""
        return max((moment for moment, _ in self._moments("attached", "user_code_ns")), default=None)

    def first_step_ns(self) -> int | None:
        """When the last rank was through its first iteration; None if not all ranks were."""
        ended = {record.get("rank"): moment for moment, record in self._moments("first_step", "at_ns")}
        return max(ended.values()) if ended and ended.keys() >= self._ranks() else None

    def first_iteration(self) -> int | None:
        return min(_numbers(record.get("iteration") for _, record in self._of("first_iteration")), default=None)

    @cached_property
    def all_training_ns(self) -> int | None:
        """When the last rank began its first iteration; None if not all ranks did."""
        begun = {record.get("rank"): moment for moment, record in self._moments("first_iteration", "at_ns")}
        return max(begun.values()) if begun and begun.keys() >= self._ranks() else None

    def _ranks(self) -> set[int]:
        """All ranks of the cycle, as far as the logs know."""
        ranks = {record.get("rank") for _, record in self._of("attached")}
        for _, record in self._of("cycle_started"):
            ranks |= {rank.get("rank") for rank in record.get("ranks") or []}
        return ranks - {None}

    def _last_iteration(self) -> int | None:
        return max(_numbers(record.get("iteration") for _, record in self._records), default=None)

    def _fault(self) -> InjectedFault | None:
        for at, record in self._of("fault_injected"):
            return InjectedFault(
                type=record.get("type"),
                rank=record.get("rank"),
                iteration=record.get("iteration"),
                at_ns=at,
            )
        return None

    def _noticed_ns(self) -> int | None:
        """The first verdict, or the first exit that we hadn't caused ourselves."""
        moments = [moment for moment, record in self._moments("verdict", "at_ns") if not record.get("observed_only")]
        for at, record in self._of("rank_exited"):
            if not record.get("by_us") and record.get("exitcode") != 0:
                moments.append(at)
        return min(moments, default=self.ended_ns)

    def _fault_ns(self, fault: InjectedFault | None, noticed_ns: int | None) -> int | None:
        if fault is not None and (noticed_ns is None or fault.at_ns <= noticed_ns):
            return fault.at_ns
        verdicts = [moment for moment, r in self._moments("verdict", "since_ns") if not r.get("observed_only")]
        return verdicts[0] if verdicts else None

    def _redone(self, resumed: _Cycle | None) -> int | None:
        last, first = self._last_iteration(), resumed.first_iteration() if resumed is not None else None
        if last is None or first is None:
            return None
        # Iteration n is reported as it begins: the one that was under way, `last`, wasn't finished.
        return max(0, last - first)


def _importance(pair: TimedRecord) -> tuple[bool, bool, int]:
    """Of the ends that several launchers recorded for one cycle the one that knows the cause comes first."""
    at, record = pair
    cause = record.get("cause")
    return cause is None, cause is not None and cause.get("kind") == "membership", at


def _numbers(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _seconds(begin_ns: int | None, end_ns: int | None) -> float | None:
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9
