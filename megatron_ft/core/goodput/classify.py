"""Goodput: every second of a job's life is in exactly one class. Pure.

The job is seen as one: its ranks train in step. A cycle is cut at the moments that its records tell, in order, and a
moment that isn't known joins two neighbours. So the seconds of the classes always add up to the life.

| class | from | to |
|---|---|---|
| start-up | the life's beginning, less the wait for nodes | the first iteration of the first cycle |
| waiting for nodes | the end of the ranks; at first, of the launcher's start | all nodes have met |
| restart | the verdict or exit; all nodes have met | the ranks are gone; the first iteration |
| productive, redone step | the first iteration on all ranks | the fault, the verdict, or the end |
| detection | the fault | the verdict, or the exit |
| after the end | the last section event of the last cycle | the life's end |

Checkpoint saves, restores from memory, and pauses are cut out of these.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.board.intervals import CHECKPOINTING
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import (
    CauseKind,
    CycleEnded,
    CycleStarted,
    Meeting,
    Paused,
    RankExited,
    Resumed,
    SnapshotRestored,
)
from megatron_ft.core.facts.monitor import Attached, FirstIteration, FirstStep, Minute, RankGone
from megatron_ft.core.facts.rank import FaultInjected
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.facts.timed import Timed
from megatron_ft.core.times import earliest

Span = tuple[int, int]
"""Beginning and end, ns."""


class TimeClass(enum.Enum):
    """Class of a second of a life."""

    PRODUCTIVE = "productive_step"
    REDONE = "redone_step"
    """An iteration that a later cycle begins again, completed or not."""
    SAVE = "checkpoint_save"
    LOAD = "checkpoint_load"
    """Restores from memory. A load from a file is part of the start-up or restart in which it happens."""
    START_UP = "start_up"
    DETECTION = "detection"
    RESTART = "restart"
    WAITING = "waiting_for_nodes"
    PAUSED = "paused"
    """Part of a pause of hang detection in which a single iteration was in progress."""
    AFTER_END = "after_the_end"


RESTART_PHASES = ("stop", "spawn", "user_code", "imports", "setup")
"""Phases of RESTART: until the ranks are gone; are created; begin their script; have connected; begin to iterate."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of one life by class; they add up to ``total_s``.

    Args:
        seconds: of every class.
        restart_s: those of RESTART, by phase.
        iterations: completed, and not done again.
        redone: completed, and done again.
    """

    seconds: Mapping[TimeClass, float]
    restart_s: Mapping[str, float]
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

    @property
    def lost_s(self) -> float:
        """Seconds that faults have cost: redone steps, detection, restarts, and the waits for nodes."""
        lost = (TimeClass.REDONE, TimeClass.DETECTION, TimeClass.RESTART, TimeClass.WAITING)
        return sum(self.seconds[each] for each in lost)


def classify(
    events: Iterable[Timed[Record | None]], *, begin_ns: int | None = None, end_ns: int | None = None
) -> Goodput | None:
    """Return the classes of one life's seconds; None if no rank has begun an iteration, as in a script without hooks.

    Args:
        events: the life's records, of all nodes or of one.
        begin_ns, end_ns: the life, on the events' clock; None: from the first event to the last.
    """
    told = sorted(events, key=lambda event: event.at_ns)
    life = _Life(told)
    if not any(cycle.begun for cycle in life.cycles.values()):
        return None
    begin_ns = told[0].at_ns if begin_ns is None else begin_ns
    end_ns = told[-1].at_ns if end_ns is None else end_ns
    sums = _Sums(begin_ns, end_ns)
    again: int | None = None
    plan: list[tuple[_Cycle, _Cycle | None, int | None]] = []
    following = None
    for _, cycle in sorted(life.cycles.items(), reverse=True):
        plan.append((cycle, following, again))
        following, again = cycle, earliest(again, cycle.first)
    for cycle, following, again in reversed(plan):
        _add_cycle(sums, life, cycle, following, again, is_first=cycle is plan[-1][0])
    sums.take(TimeClass.AFTER_END, end_ns)
    return sums.goodput()


@dataclass
class _Cycle:
    """What the records of one cycle tell, wall ns; None is unknown."""

    ranks: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    """First iteration's beginning, by rank."""
    first: int | None = None
    """Number of the first iteration."""
    last: int | None = None
    """Number of the last one that began."""
    met_ns: int | None = None
    created_ns: int | None = None
    user_code_ns: int | None = None
    attached_ns: int | None = None
    injected_ns: int | None = None
    since_ns: int | None = None
    """Beginning of the interval that was found overdue."""
    noticed_ns: int | None = None
    """First verdict, or first exit that wasn't caused by launcher or monitor."""
    ended_ns: int | None = None
    outcome: str = "unknown"
    active_ns: int | None = None
    """Last section event of any rank."""
    newest_ns: int = 0
    """Last record of the cycle."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Beginnings of iterations, by number."""
    told_by: int | None = None
    """Rank whose minutes are taken: ranks train in step."""
    cut_out: list[tuple[Span, TimeClass]] = field(default_factory=list)
    """Saves and loads."""

    @property
    def training_ns(self) -> int | None:
        """Time at which the last rank began its first iteration; None if not all ranks did."""
        return max(self.begun.values()) if self.begun and self.begun.keys() >= self.ranks else None

    @property
    def failure(self) -> tuple[int, int] | None:
        """Fault, as far as known, and when it was noticed; None: nothing failed, or no rank tells of it."""
        noticed_ns = self.noticed_ns
        if noticed_ns is None or self.outcome in ("succeeded", "stopped"):
            return None
        injected_ns = self.injected_ns
        fault_ns = injected_ns if injected_ns is not None and injected_ns <= noticed_ns else self.since_ns
        return (noticed_ns if fault_ns is None else min(fault_ns, noticed_ns)), noticed_ns

    def take(self, event: Timed[Record | None]) -> None:
        record = event.record
        self.newest_ns = max(self.newest_ns, event.at_ns)
        match record:
            case CycleStarted():
                self.ranks |= {each.rank for each in record.ranks}
                self.met_ns = _later(self.met_ns, _moment(event, record.met_ns))
                self.created_ns = _later(self.created_ns, _moment(event, record.spawned_ns) or event.at_ns)
            case Attached() if not record.watch_only:
                self.ranks.add(record.rank)
                self.user_code_ns = _later(self.user_code_ns, _moment(event, record.user_code_ns))
                self.attached_ns = _later(self.attached_ns, _moment(event, record.at_ns) or event.at_ns)
            case FirstIteration():
                at_ns = event.wall_ns(record.at_ns)
                self.begun[record.rank] = at_ns
                self.first = record.iteration if self.first is None else min(self.first, record.iteration)
                self._reach(record.iteration)
                self.anchors.setdefault(record.iteration, at_ns)
            case FirstStep() if record.began_ns is not None:
                self.begun.setdefault(record.rank, event.wall_ns(record.began_ns))
            case FaultInjected():
                self.injected_ns = earliest(self.injected_ns, event.at_ns)
            case RankHung() if not record.observed_only:
                self.since_ns = earliest(self.since_ns, event.wall_ns(record.since_ns))
                self.noticed_ns = earliest(self.noticed_ns, event.wall_ns(record.at_ns))
            case Minute():
                self._take_minute(event, record)
            case RankGone():
                self._reach(record.iteration)
                self.active_ns = _later(self.active_ns, _moment(event, record.last_transition_ns))
            case SnapshotRestored() if record.seconds is not None:
                span = event.at_ns - round(record.seconds * 1e9), event.at_ns
                self.cut_out.append((span, TimeClass.LOAD))
            case RankExited() | CycleEnded():
                self._take_end(event, record)

    def _take_end(self, event: Timed[Record | None], record: RankExited | CycleEnded) -> None:
        self._reach(record.iteration)
        match record:
            case RankExited() if not record.by_us and record.exitcode:
                self.noticed_ns = earliest(self.noticed_ns, _moment(event, record.at_ns or None) or event.at_ns)
            case CycleEnded():
                self.ended_ns = _later(self.ended_ns, event.at_ns)
                told_more = record.cause is None or record.cause.kind is not CauseKind.MEMBERSHIP
                self.outcome = record.outcome if told_more or self.outcome == "unknown" else self.outcome

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
                spans = saves.spans or ((of.to_s - saves.total_s, saves.total_s),)
                for begin_s, length_s in spans:
                    begin_ns = zero_ns + round(begin_s * 1e9)
                    self.cut_out.append(((begin_ns, begin_ns + round(length_s * 1e9)), TimeClass.SAVE))

    def _reach(self, iteration: int | None) -> None:
        if iteration is not None:
            self.last = iteration if self.last is None else max(self.last, iteration)


class _Life:
    """Cycles of a life, the first meeting of its nodes, and the pauses."""

    def __init__(self, events: Sequence[Timed[Record | None]]) -> None:
        self.cycles: dict[int, _Cycle] = {}
        self.meeting_ns: int | None = None
        self.pauses: list[Span] = []
        since: dict[str, int] = {}
        for event in events:
            match event.record:
                case Meeting():
                    self.meeting_ns = earliest(self.meeting_ns, event.at_ns)
                case Paused():
                    since.setdefault(event.host, event.at_ns)
                case Resumed() if event.host in since:
                    self.pauses.append((since.pop(event.host), event.at_ns))
            number = getattr(event.record, "cycle", None)
            if isinstance(number, int):
                self.cycles.setdefault(number, _Cycle()).take(event)
        newest_ns = events[-1].at_ns if events else 0
        self.pauses += [(begin_ns, newest_ns) for begin_ns in since.values()]


class _Sums:
    """Seconds taken so far: everything before ``at_ns`` is in a class."""

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self.at_ns = begin_ns
        self._end_ns = max(begin_ns, end_ns)
        self._ns = dict.fromkeys(TimeClass, 0)
        self._restart_ns = dict.fromkeys(RESTART_PHASES, 0)
        self.iterations = self.redone = 0

    def clamp(self, until_ns: int) -> int:
        """Return the moment, but none before ``at_ns`` and none after the life."""
        return min(max(until_ns, self.at_ns), self._end_ns)

    def take(
        self,
        of: TimeClass,
        until_ns: int | None,
        phase: str = "",
        cut_out: Sequence[tuple[Span, TimeClass]] = (),
    ) -> None:
        """Take the time until then, None: none; what is cut out of it is of another class."""
        until_ns = self.at_ns if until_ns is None else self.clamp(until_ns)
        for begin_ns, end_ns, other in _pieces(self.at_ns, until_ns, cut_out):
            self._ns[other or of] += end_ns - begin_ns
            if other is None and of is TimeClass.RESTART:
                self._restart_ns[phase] += end_ns - begin_ns
        self.at_ns = until_ns

    def goodput(self) -> Goodput:
        return Goodput(
            seconds={each: ns / 1e9 for each, ns in self._ns.items()},
            restart_s={phase: ns / 1e9 for phase, ns in self._restart_ns.items()},
            iterations=self.iterations,
            redone=self.redone,
        )


def _pieces(
    begin_ns: int, end_ns: int, cut_out: Sequence[tuple[Span, TimeClass]]
) -> Iterator[tuple[int, int, TimeClass | None]]:
    """Yield the stretches from ``begin_ns`` to ``end_ns``; where what is cut out overlaps, the first one counts."""
    edges = {begin_ns, end_ns, *(at for span, _ in cut_out for at in span)}
    for left, right in itertools.pairwise(sorted(at for at in edges if begin_ns <= at <= end_ns)):
        yield left, right, next((of for span, of in cut_out if span[0] <= left and right <= span[1]), None)


def _add_cycle(
    sums: _Sums, life: _Life, cycle: _Cycle, following: _Cycle | None, again: int | None, *, is_first: bool
) -> None:
    """Add one cycle, whose iterations from ``again`` on are done again; None: no later cycle has begun any."""
    if is_first:
        sums.take(TimeClass.START_UP, life.meeting_ns)
    start = TimeClass.START_UP if is_first else TimeClass.RESTART
    stops_ns, noticed_ns = cycle.failure or (_quiet_end(cycle, following), None)
    sums.take(TimeClass.WAITING, None if cycle.met_ns is None else min(cycle.met_ns, stops_ns))
    cut_out = cycle.cut_out
    for phase, until_ns in (
        ("spawn", cycle.created_ns),
        ("user_code", cycle.user_code_ns),
        ("imports", cycle.attached_ns),
        ("setup", stops_ns if cycle.training_ns is None else cycle.training_ns),
    ):
        sums.take(start, None if until_ns is None else min(until_ns, stops_ns), phase, cut_out)
    if cycle.training_ns is not None:
        _add_steps(sums, cycle, sums.clamp(stops_ns), life.pauses, again)
    sums.take(TimeClass.DETECTION, noticed_ns)
    if following is not None:
        sums.take(TimeClass.RESTART, cycle.ended_ns, "stop")


def _quiet_end(cycle: _Cycle, following: _Cycle | None) -> int:
    """Return the end of the training of a cycle without a failure, or of one whose failure isn't known."""
    if cycle.ended_ns is None:
        return cycle.newest_ns
    if cycle.outcome != "failed" and following is None and cycle.active_ns is not None:
        return min(cycle.active_ns, cycle.ended_ns)
    return cycle.ended_ns


def _add_steps(sums: _Sums, cycle: _Cycle, end_ns: int, pauses: Sequence[Span], again: int | None) -> None:
    """Add the time from the first iteration of all ranks to ``end_ns``."""
    first, last = cycle.first, cycle.last
    if first is None or last is None:
        sums.take(TimeClass.PRODUCTIVE, end_ns, cut_out=cycle.cut_out)
        return
    is_last_completed = cycle.outcome == "succeeded" if again is None else again > last
    completed = last + 1 if is_last_completed else last
    counted = completed if again is None else max(first, min(again, completed))
    sums.iterations += counted - first
    sums.redone += completed - counted
    known = [*sorted((at_ns, number) for number, at_ns in cycle.anchors.items()), (end_ns, last + 1)]
    split_ns = end_ns if again is None or again > last else _begin_of(again, known)
    stands = [(a, c) for (a, before), (c, after) in itertools.pairwise(known) if after - before == 1]
    cut_out = [*cycle.cut_out, *(((max(a, c), min(b, d)), TimeClass.PAUSED) for a, b in pauses for c, d in stands)]
    cut_out = [(span, of) for span, of in cut_out if span[0] < span[1]]
    sums.take(TimeClass.PRODUCTIVE, min(split_ns, end_ns), cut_out=cut_out)
    sums.take(TimeClass.REDONE, end_ns, cut_out=cut_out)


def _begin_of(iteration: int, known: Sequence[tuple[int, int]]) -> int:
    """Return when an iteration began: between two whose beginnings are known, in proportion."""
    for (left_ns, before), (right_ns, after) in itertools.pairwise(known):
        if before <= iteration < after:
            return left_ns + (right_ns - left_ns) * (iteration - before) // (after - before)
    return known[0][0]


def _moment(event: Timed[Record | None], moment_ns: int | None) -> int | None:
    return None if moment_ns is None else event.wall_ns(moment_ns)


def _later(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else max(known, new)
