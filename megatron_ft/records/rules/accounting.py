"""Accounting of a job: each second of its life in one class, its cycles and its reported hangs. Pure.

There is one accounting. The launcher feeds a `Ledger` with each record that it writes to its event log, and shows the
result in metrics, `megatron-ft status` and `result.json`; `megatron-ft report` feeds one with the logs of all nodes.

The job is seen as one: its ranks train in step. A cycle is cut at the moments that its records tell, in order, and a
moment that isn't known joins two neighbours. So the seconds of the classes always add up to the life.

| class | from | to |
|---|---|---|
| launch | the start of the launcher's process | its nodes begin to meet; one node alone: its first cycle is decided |
| waiting for nodes | the end of the ranks; at first, of the launch | all nodes have met |
| start-up | all nodes have met, in the first cycle | its first iteration on all ranks |
| restart | the verdict or exit; all nodes have met | the ranks are gone; the first iteration |
| productive, redone step | the first iteration on all ranks | the fault, the verdict, or the end |
| detection | the fault | the verdict, or the exit |
| hung | the beginning of an interval that was reported as a hang | the next iteration, or the order to end the ranks |
| after the end | the last section event of the last cycle | the life's end |

Checkpoint saves, restores from memory, and pauses are cut out of these. A step that fails is lost, and counts as a
redone one: for as long as the steps before took on average. What is beyond that is detection.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.link.base.intervals import CHECKPOINTING
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.link.facts.launcher import (
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    HangReported,
    Meeting,
    Paused,
    RankExited,
    Resumed,
    SnapshotRestored,
    TrainingAgain,
)
from megatron_ft.link.facts.monitor import Attached, FirstIteration, FirstStep, Minute, RankGone
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.link.facts.reported_hang import ReportedHang
from megatron_ft.link.facts.shared import RankHung

Span = tuple[int, int]
"""Beginning and end, ns."""
_OfRanks = Attached | FirstIteration | FirstStep | Minute | RankGone | RankExited


class TimeClass(enum.Enum):
    """Class of a second of a life."""

    PRODUCTIVE = "productive_step"
    REDONE = "redone_step"
    """An iteration that a later cycle begins again, or that was never completed."""
    SAVE = "checkpoint_save"
    LOAD = "checkpoint_load"
    """Restores from memory. A load from a file is part of the start-up or restart in which it happens."""
    LAUNCH = "launch"
    START_UP = "start_up"
    DETECTION = "detection"
    HUNG = "hung"
    """Hung and not restarted: reported only."""
    RESTART = "restart"
    WAITING = "waiting_for_nodes"
    PAUSED = "paused"
    """Part of a pause of hang detection in which a single iteration was in progress."""
    AFTER_END = "after_the_end"


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of one life by class; they add up to ``total_s``.

    Args:
        seconds: of every class.
        iterations: completed, and not done again.
        redone: completed, and done again.
    """

    seconds: Mapping[TimeClass, float]
    iterations: int
    redone: int

    @property
    def total_s(self) -> float:
        """Seconds of the life."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Goodput from 0 to 1: the share of productive steps."""
        return self.seconds[TimeClass.PRODUCTIVE] / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, kw_only=True)
class CycleSummary:
    """One cycle of a job.

    Args:
        end_ns: when the ranks of all nodes had ended; None if no record tells.
        outcome: "succeeded", "failed" or "stopped"; "unknown" if no record tells: it may still run.
        cause: of the node that knows most; None if nothing failed.
        iteration: completed by the rank at fault.
        fault: one injected by a plan or a simulation.
        first_iteration, last_iteration: of the whole cycle; None if no iteration began in it.
        noticed_after_s: from the fault to the verdict or the noticed exit. The fault is the injected one; else,
            for a hang, the moment from which the overdue section was open; else unknown.
        training_again_after_s: from the verdict or exit until all ranks were through their first step in a later cycle,
            as the launcher's line "is training again" says.
        iterations_redone: finished in this cycle and run again in that later one.
        phases: seconds of the phases of the restart after this cycle, by name; those of `TrainingAgain`.
        restarts_left: for the next cycle, once this one has ended on a node; else as it began.
        restored: iteration that its ranks have restored from memory; None if they haven't.
    """

    cycle: int
    begin_ns: int
    end_ns: int | None
    outcome: str
    restarts: bool = False
    cause: Cause | None = None
    iteration: int | None = None
    first_iteration: int | None = None
    last_iteration: int | None = None
    fault: Timed[FaultInjected] | None = None
    noticed_after_s: float | None = None
    training_again_after_s: float | None = None
    iterations_redone: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    restarts_left: int | None = None
    restored: int | None = None

    @property
    def text(self) -> str:
        """Its cause or outcome; "" if no record tells."""
        return self.cause.text if self.cause else "" if self.outcome == "unknown" else self.outcome


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Classes of a job's time. ``goodput`` is None if no iteration has begun, as in a script without hooks."""

    goodput: Goodput | None = None
    cycles: tuple[CycleSummary, ...] = ()
    hangs: tuple[ReportedHang, ...] = ()


class Ledger:
    """Takes the records of a life, in the order of time."""

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._cycles: dict[int, _Cycle] = {}
        self._meeting_ns: int | None = None
        self._pauses: list[Span] = []
        self._paused: dict[str, int] = {}

    def take(self, event: Timed[Record | None]) -> None:
        """Take the next record."""
        match event.record:
            case Meeting(how="coordinated"):
                self._meeting_ns = earliest(self._meeting_ns, event.at_ns)
            case Paused():
                self._paused.setdefault(event.host, event.at_ns)
            case Resumed() if event.host in self._paused:
                self._pauses.append((self._paused.pop(event.host), event.at_ns))
        number = getattr(event.record, "cycle", None)
        if isinstance(number, int):
            self._cycles.setdefault(number, _Cycle(number, event.at_ns)).take(event)

    def accounting(self, end_ns: int) -> Accounting:
        """Return the accounting up to ``end_ns``."""
        cycles = [self._cycles[number] for number in sorted(self._cycles)]
        summaries: list[CycleSummary] = []
        following = resumed = None
        for cycle in reversed(cycles):  # each cycle needs the next one, and the next one that trained
            summaries.append(cycle.summary(following, resumed))
            following, resumed = cycle, cycle if cycle.training_ns is not None else resumed
        return Accounting(
            goodput=self._goodput(cycles, end_ns) if any(cycle.begun for cycle in cycles) else None,
            cycles=tuple(reversed(summaries)),
            hangs=tuple(hang for cycle in cycles for hang in cycle.reported(self._begin_ns, end_ns)),
        )

    def _goodput(self, cycles: Sequence[_Cycle], end_ns: int) -> Goodput:
        sums = _Sums(self._begin_ns, end_ns, [*self._pauses, *((at_ns, end_ns) for at_ns in self._paused.values())])
        sums.take(TimeClass.LAUNCH, cycles[0].met_ns if self._meeting_ns is None else self._meeting_ns)
        again = None
        firsts: list[int | None] = []
        for cycle in reversed(cycles):
            firsts.append(again)
            again = earliest(again, cycle.first)
        for cycle, again, following in zip(cycles, reversed(firsts), [*cycles[1:], None], strict=True):
            sums.add(cycle, again, following, TimeClass.START_UP if cycle is cycles[0] else TimeClass.RESTART)
        sums.take(TimeClass.WAITING if cycles[-1].restarts else TimeClass.AFTER_END, end_ns)
        return Goodput(
            seconds={each: ns / 1e9 for each, ns in sums.ns.items()}, iterations=sums.iterations, redone=sums.redone
        )


@dataclass
class _Overdue:
    """A reported hang so far, wall ns."""

    rank: int | None
    section: str
    iteration: int | None
    since_ns: int
    text: str


@dataclass
class _Cycle:
    """Facts in the records of one cycle; times are wall ns, None if unknown."""

    number: int
    newest_ns: int
    """Last record of the cycle; at first its first one."""
    began_ns: int | None = None
    ranks: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    """First iteration's beginning, by rank."""
    first: int | None = None
    """Number of the first iteration."""
    last: int | None = None
    """Number of the last one that began."""
    gone: dict[int, int] = field(default_factory=dict)
    """Number of the last iteration that began, by rank, of those that have ended or were looked at."""
    met_ns: int | None = None
    noticed_ns: int | None = None
    """First verdict, or first exit that wasn't caused by launcher or monitor."""
    since_ns: int | None = None
    """Beginning of the interval that was found overdue."""
    ends: list[Timed[CycleEnded]] = field(default_factory=list)
    fault: Timed[FaultInjected] | None = None
    active_ns: int | None = None
    """Last section event of any rank."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Beginnings of iterations, by number."""
    told_by: int | None = None
    """Rank whose minutes are taken: ranks train in step."""
    cut_out: list[tuple[Span, TimeClass]] = field(default_factory=list)
    """Saves and loads."""
    overdue: dict[tuple[str, int | None], _Overdue] = field(default_factory=dict)
    """Reported hangs, by what was overdue and the iteration."""
    started: CycleStarted | None = None
    restored: SnapshotRestored | None = None
    again: tuple[bool, TrainingAgain] | None = None
    """Record of the node at place 0 (True), or of another node."""
    speaker: str | None = None
    """Host at place 0."""

    def take(self, event: Timed[Record | None]) -> None:
        """Take a record of this cycle."""
        record = event.record
        before_ns, self.newest_ns = self.newest_ns, max(self.newest_ns, event.at_ns)
        match record:
            case Attached() | FirstIteration() | FirstStep() | Minute() | RankGone() | RankExited():
                self._take_progress(event, record, before_ns)
            case CycleStarted():
                self.ranks |= {each.rank for each in record.ranks}
                self.began_ns = earliest(self.began_ns, event.at_ns)
                self.met_ns = _later(self.met_ns, _moment(event, record.met_ns))
                self.started = self.started or record
                self.speaker = event.host if record.group_rank == 0 else self.speaker
            case FaultInjected() if self.fault is None:
                self.fault = Timed(event.at_ns, event.offset_ns, event.host, record)
            case RankHung():
                self._take_verdict(event, record)
            case HangReported(ends=False):  # it says more than the verdict that led to it
                key = record.section, record.iteration
                known = self.overdue.get(key)
                since_ns = event.at_ns - round(record.elapsed_s * 1e9) if known is None else known.since_ns
                self.overdue[key] = _Overdue(record.rank, *key, since_ns, record.text)
            case SnapshotRestored():
                self.restored = self.restored or record
                if record.seconds is not None:
                    span = event.at_ns - round(record.seconds * 1e9), event.at_ns
                    self.cut_out.append((span, TimeClass.LOAD))
            case TrainingAgain():
                speaks = event.host == self.speaker
                self.again = (speaks, record) if self.again is None or speaks > self.again[0] else self.again
            case CycleEnded():
                self._reach(record.iteration)
                self.ends.append(Timed(event.at_ns, event.offset_ns, event.host, record))

    def _take_progress(self, event: Timed[Record | None], record: _OfRanks, before_ns: int) -> None:
        """Take how far ranks are; the record before was of ``before_ns``."""
        match record:
            case Attached() if not record.watch_only:
                self.ranks.add(record.rank)
            case FirstIteration():
                at_ns = event.wall_ns(record.at_ns)
                self.begun[record.rank] = at_ns
                self.first = record.iteration if self.first is None else min(self.first, record.iteration)
                self._reach(record.iteration)
                self.anchors.setdefault(record.iteration, at_ns)
            case FirstStep() if record.began_ns is not None:  # the record of the first iteration may be lost
                self.begun.setdefault(record.rank, event.wall_ns(record.began_ns))
            case Minute():
                self._take_minute(event, record)
            case RankGone():
                if self.overdue and record.iteration is not None and record.iteration > (self.last or 0):
                    self.anchors.setdefault(record.iteration, before_ns)
                self._reach(record.iteration, record.rank)
                self.active_ns = _later(self.active_ns, _moment(event, record.last_transition_ns))
            case RankExited():
                self._reach(record.iteration, record.rank)
                if not record.by_us and record.exitcode:
                    self.noticed_ns = earliest(self.noticed_ns, _moment(event, record.at_ns or None) or event.at_ns)

    def _take_verdict(self, event: Timed[Record | None], verdict: RankHung) -> None:
        since_ns, at_ns = event.wall_ns(verdict.since_ns), event.wall_ns(verdict.at_ns)
        if not verdict.observed_only:
            self.since_ns = earliest(self.since_ns, since_ns)
            self.noticed_ns = earliest(self.noticed_ns, at_ns)
            return
        key = verdict.timed, verdict.iteration
        known = self.overdue.get(key)
        if known is None:
            text = (
                f"rank {verdict.rank} was overdue after {verdict.elapsed_s:.1f} s (timeout {verdict.timeout_s:.1f} s)"
            )
            known = _Overdue(verdict.rank, *key, since_ns, text)
            self.overdue[key] = known
        known.since_ns = min(known.since_ns, since_ns)

    def _take_minute(self, event: Timed[Record | None], record: Minute) -> None:
        """Take the iterations and saves of one rank, the lowest known."""
        lowest = min((row.rank for row in record.ranks), default=None)
        if lowest is None or (self.told_by is not None and lowest > self.told_by):
            return
        self.told_by = lowest
        for of in (row for row in record.ranks if row.rank == lowest):
            zero_ns = event.wall_ns(record.at_ns)
            for iteration, at_s in of.iterations:
                self._reach(iteration)
                self.anchors[iteration] = zero_ns + round(at_s * 1e9)
            saves = of.sections.get(CHECKPOINTING)
            if saves is not None:
                # more than a few in a minute: as one at its end
                spans = [*saves.spans] or [(of.to_s - saves.total_s, saves.total_s)]
                if saves.open_s > 0:
                    spans.append((of.to_s - saves.open_s, saves.open_s))
                    self.active_ns = _later(self.active_ns, zero_ns + round(of.to_s * 1e9))
                for begin_s, length_s in spans:
                    begin_ns = zero_ns + round(begin_s * 1e9)
                    self.cut_out.append(((begin_ns, begin_ns + round(length_s * 1e9)), TimeClass.SAVE))

    def _reach(self, iteration: int | None, rank: int | None = None) -> None:
        if iteration is not None:
            if rank is not None:
                self.gone[rank] = max(iteration, self.gone.get(rank, iteration))
            self.last = iteration if self.last is None else max(self.last, iteration)

    # -- what follows from it -----------------------------------------------------------------------------------

    @property
    def end(self) -> CycleEnded | None:
        """End as the node tells it that knows the cause best."""

        def importance(ended: Timed[CycleEnded]) -> tuple[bool, bool, int]:
            cause = ended.record.cause
            return cause is None, cause is not None and cause.kind is CauseKind.MEMBERSHIP, ended.at_ns

        best = min(self.ends, key=importance, default=None)
        return None if best is None else best.record

    @property
    def ended_ns(self) -> int | None:
        """Time at which the ranks of all nodes had ended."""
        return max((each.at_ns for each in self.ends), default=None)

    @property
    def ending_ns(self) -> int | None:
        """Time at which a launcher began to end its ranks: what they need to stop is no part of a hang."""
        return min((_moment(each, each.record.ending_ns) or each.at_ns for each in self.ends), default=None)

    @property
    def outcome(self) -> str:
        return "unknown" if self.end is None else self.end.outcome

    @property
    def restarts(self) -> bool:
        """True if another cycle follows."""
        return any(each.record.restarts for each in self.ends)

    @property
    def reached(self) -> int | None:
        """Number of the last iteration that began on all ranks, as far as known."""
        return min(self.gone.values(), default=self.last)

    @property
    def training_ns(self) -> int | None:
        """Time at which the last rank began its first iteration; None if not all ranks did."""
        return max(self.begun.values()) if self.begun and self.begun.keys() >= self.ranks else None

    @property
    def failed_ns(self) -> int | None:
        """Time at which the failure was noticed; None: nothing failed so far."""
        if self.outcome in ("succeeded", "stopped"):
            return None
        if self.outcome == "unknown":
            return self.noticed_ns
        told = ((each, each.record.noticed_ns or each.record.ending_ns) for each in self.ends)
        own_ns = min((_moment(each, at_ns) or each.at_ns for each, at_ns in told), default=None)
        return own_ns if self.noticed_ns is None else self.noticed_ns

    def quiet_end(self, *, is_last: bool) -> int:
        """Return the end of the training of a cycle without a failure, or of one whose failure isn't known."""
        if self.ended_ns is None:
            return self.newest_ns
        if self.outcome == "failed" or not is_last or self.active_ns is None:
            return self.ended_ns
        return min(max([*self.anchors.values(), self.active_ns]), self.ended_ns)  # a script may open no sections

    def went_on_ns(self, hang: _Overdue, end_ns: int) -> int | None:
        """Return when the ranks went on after a reported hang; None if they haven't by ``end_ns``."""
        later = [at_ns for number, at_ns in self.anchors.items() if number > (hang.iteration or -1)]
        next_ns = min((at_ns for at_ns in later if at_ns > hang.since_ns), default=None)
        reached = hang.iteration is not None and (self.last or 0) > hang.iteration
        if next_ns is None and (reached or self.outcome == "succeeded"):
            return earliest(self.ended_ns, end_ns)
        return next_ns

    def reported(self, begin_ns: int, end_ns: int) -> Iterator[ReportedHang]:
        """Yield the reported hangs of a life from ``begin_ns`` to ``end_ns``."""
        for each in self.overdue.values():
            went_on_ns = self.went_on_ns(each, end_ns)
            until_ns = earliest(went_on_ns, self.ending_ns, end_ns) or end_ns
            yield ReportedHang(
                cycle=self.number,
                rank=each.rank,
                section=each.section,
                iteration=each.iteration,
                after_s=(each.since_ns - begin_ns) / 1e9,
                seconds=max(0, until_ns - each.since_ns) / 1e9,
                went_on=went_on_ns is not None,
                text=each.text,
            )

    def summary(self, following: _Cycle | None, resumed: _Cycle | None) -> CycleSummary:
        """Summarize the cycle; ``following`` is the next one, ``resumed`` the next one in which all ranks trained."""
        end, fault = self.end, self.fault
        cause = None if end is None else end.cause
        noticed_ns = self.failed_ns
        fault_ns = None
        if noticed_ns is not None:
            fault_ns = fault.at_ns if fault is not None and fault.at_ns <= noticed_ns else self.since_ns
        notice_s = None if noticed_ns is None or fault_ns is None else (noticed_ns - fault_ns) / 1e9
        phases = {} if following is None or following.again is None else dict(following.again[1].seconds)
        last, first = self.reached, None if resumed is None else resumed.first
        restored = self.restored
        left = [each.record.restarts_left for each in self.ends if each.record.restarts_left is not None]
        return CycleSummary(
            cycle=self.number,
            begin_ns=self.newest_ns if self.began_ns is None else self.began_ns,
            end_ns=self.ended_ns,
            outcome=self.outcome,
            restarts=self.restarts,
            cause=cause,
            iteration=None if end is None else end.iteration,
            first_iteration=self.first,
            last_iteration=self.last,
            fault=fault,
            noticed_after_s=notice_s,
            training_again_after_s=sum(phases.values()) if phases else None,
            # iteration n is reported as it begins: the current one, `last`, wasn't completed
            iterations_redone=None if last is None or first is None else max(0, last - first),
            phases=phases,
            restarts_left=min(left, default=None if self.started is None else self.started.restarts_left),
            restored=None if restored is None else restored.key.iteration,
        )


class _Sums:
    """Time taken so far: everything before ``at_ns`` is in a class."""

    def __init__(self, begin_ns: int, end_ns: int, pauses: Sequence[Span]) -> None:
        self.at_ns = begin_ns
        self._end_ns = max(begin_ns, end_ns)
        self._pauses = pauses
        self.ns = dict.fromkeys(TimeClass, 0)
        self.iterations = self.redone = 0

    def take(self, of: TimeClass, until_ns: int | None, cut_out: Sequence[tuple[Span, TimeClass]] = ()) -> None:
        """Take the time until then, None: none; what is cut out of it is of another class."""
        until_ns = self.at_ns if until_ns is None else min(max(until_ns, self.at_ns), self._end_ns)
        inside = [(span, other) for span, other in cut_out if span[0] < until_ns and span[1] > self.at_ns]
        edges = {self.at_ns, until_ns, *(at for span, _ in inside for at in span)}
        for left, right in itertools.pairwise(sorted(at for at in edges if self.at_ns <= at <= until_ns)):
            # where what is cut out overlaps, the first one counts
            other = next((other for span, other in inside if span[0] <= left and right <= span[1]), of)
            self.ns[other] += right - left
        self.at_ns = until_ns

    def add(self, cycle: _Cycle, again: int | None, following: _Cycle | None, start: TimeClass) -> None:
        """Add one cycle, whose iterations from ``again`` on are done again; None: no later cycle has begun any."""
        noticed_ns = cycle.failed_ns
        hangs = cycle.overdue.values()
        hung = [each.since_ns for each in hangs if cycle.went_on_ns(each, self._end_ns) is None]
        stops_ns = cycle.quiet_end(is_last=following is None) if noticed_ns is None else noticed_ns
        overdue_ns = earliest(*hung, None if noticed_ns is None else cycle.since_ns)
        faulty_ns = stops_ns if overdue_ns is None else min(overdue_ns, stops_ns)
        self.take(TimeClass.WAITING, None if cycle.met_ns is None else min(cycle.met_ns, stops_ns))
        training_ns = cycle.training_ns
        self.take(start, faulty_ns if training_ns is None else min(training_ns, faulty_ns), cycle.cut_out)
        if training_ns is not None:
            self._add_steps(
                cycle, min(max(faulty_ns, self.at_ns), self._end_ns), again, is_known=overdue_ns is not None
            )
        if hung:
            self.take(TimeClass.HUNG, earliest(noticed_ns, cycle.ending_ns) or cycle.newest_ns)
        self.take(TimeClass.DETECTION, noticed_ns)
        if following is not None or cycle.restarts:
            self.take(TimeClass.RESTART, cycle.ended_ns)

    def _add_steps(self, cycle: _Cycle, end_ns: int, again: int | None, *, is_known: bool) -> None:
        """Add the time from the first iteration of all ranks to ``end_ns``, at which they hang if ``is_known``."""
        first, last = cycle.first, cycle.reached
        if first is None or last is None:
            self.take(TimeClass.PRODUCTIVE, end_ns, cycle.cut_out)
            return
        failed = cycle.failed_ns is not None or is_known
        is_last_completed = cycle.outcome == "succeeded" if again is None else again > last
        completed = last + 1 if is_last_completed else last
        counted = completed if again is None else max(first, min(again, completed))
        self.iterations += counted - first
        self.redone += completed - counted
        known = sorted((at_ns, number) for number, at_ns in cycle.anchors.items() if number <= last)
        known.append((end_ns, last + 1))
        cut_out = [*cycle.cut_out, *_pauses_in_one_step(self._pauses, known)]
        lost = again if again is not None else last if failed else last + 1
        split_ns = end_ns if lost > last else _begin_of(lost, known)
        self.take(TimeClass.PRODUCTIVE, min(split_ns, end_ns), cut_out)
        (begin_ns, begin), (latest_ns, latest) = known[0], known[max(0, len(known) - 2)]
        if failed and not is_known and begin < latest == last and lost <= last:
            step_ns = (latest_ns - begin_ns) // (latest - begin)  # the mean one
            self.take(TimeClass.REDONE, min(end_ns, max(latest_ns + step_ns, self.at_ns)), cut_out)
            self.take(TimeClass.DETECTION, end_ns, cut_out)
        else:
            self.take(TimeClass.REDONE, end_ns, cut_out)


def _pauses_in_one_step(pauses: Sequence[Span], known: Sequence[tuple[int, int]]) -> Iterator[tuple[Span, TimeClass]]:
    """Yield the parts of pauses in which a single iteration was in progress."""
    for (begin_ns, before), (end_ns, after) in itertools.pairwise(known) if pauses else ():
        for since_ns, until_ns in pauses:
            if after - before == 1 and max(since_ns, begin_ns) < min(until_ns, end_ns):
                yield (max(since_ns, begin_ns), min(until_ns, end_ns)), TimeClass.PAUSED


def _begin_of(iteration: int, known: Sequence[tuple[int, int]]) -> int:
    """Return when an iteration began: between two whose beginnings are known, in proportion."""
    for (left_ns, before), (right_ns, after) in itertools.pairwise(known):
        if before <= iteration < after:
            return left_ns + (right_ns - left_ns) * (iteration - before) // (after - before)
    return known[0][0]


def _moment(event: Timed[Record | None] | Timed[CycleEnded], moment_ns: int | None) -> int | None:
    return None if moment_ns is None else event.wall_ns(moment_ns)


def _later(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else max(known, new)
