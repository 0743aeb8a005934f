"""Learned timeouts on this node: read once, armed, surveyed, written, and doubled after a kill. Pure.

Monitors report milestones and intervals of their ranks, and apply the timeouts this launcher arms. All launchers keep
what was learned, so that any of them can be at place 0 in the next cycle: that one sends it with its answer to each
survey, and writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from megatron_ft.core.agent import edge, lines
from megatron_ft.core.agent.edge import MonitorReport, OrderMonitor, ReadState, TellStateWritten, Write, WriteState
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.step import Options, Step
from megatron_ft.core.board.layout import STATE_NOT_WRITTEN, STATE_WRITTEN
from megatron_ft.core.facts.monitor import Attached
from megatron_ft.core.facts.rank import StateLoaded, TimeoutOrigin, TimeoutsLearned
from megatron_ft.core.job.edge import Say
from megatron_ft.core.messages.monitor import RankReport
from megatron_ft.core.timeouts import budget_rule, learned
from megatron_ft.core.timeouts.exchange import (
    Arm,
    Armed,
    Facts,
    Intervals,
    Learned,
    LearnedTimeout,
    Milestone,
    Moment,
    Raised,
    Survey,
    any_of,
    enforces,
)
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.learned import Choice, LearnedState
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, merge
from megatron_ft.core.times import earliest

READ_NS = 30_000_000_000
"""Longest wait for the file server."""
ANSWER_NS = 1_000_000_000
"""Longest wait for monitors in a survey; slower ones are left out of the answer."""
_MOST_FACTOR = 1e6
_WORTH_A_LINE = 0.01


@dataclass
class _StateFile:
    """File of learned timeouts that the first rank of this node has named."""

    path: str
    until_ns: int
    """Deadline for reading it."""
    is_read: bool = False
    existed: bool = False
    may_write: bool = False


@dataclass
class _NodeSurvey:
    survey: Survey
    until_ns: int
    awaited: set[int]


@dataclass
class _OfCycle:
    """Part of one cycle. ``place`` is that of this node among all."""

    record: CycleRecord
    place: int
    world_size: int
    told: dict[Moment, int] = field(default_factory=dict)
    survey: _NodeSurvey | None = None
    answers: dict[int, Intervals] = field(default_factory=dict)
    """Newest answer of each rank, by local rank; it includes all older ones."""
    raised: set[str] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Local ranks whose run is over."""
    is_over: bool = False
    """True once the run has ended: what is learned then is for the next run, as ranks may do something else now."""


class NodeLearning:
    """Learning of one launcher, for the whole job."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cycle: _OfCycle | None = None
        self._file: _StateFile | None = None
        self._state = LearnedState()
        """Learned timeouts that are enforced."""
        self._choice = Choice()
        """Timeouts of ``_state`` that apply under today's configuration."""
        self._reported: dict[str, LearnedTimeout] = {}
        """Learned timeouts that are only reported."""
        self._known: dict[str, Known] = {}
        self._factors: dict[str, float] = {}
        """Factors by name with which kills have raised timeouts calculated by the ranks' clients."""
        self._script_learns = False
        self._lines_of_next_cycle: list[str] = []
        self._said: set[str] = set()

    # -- the cycle --------------------------------------------------------------------------------------------

    def begin(self, record: CycleRecord, met: edge.RanksMet, turn: Step) -> None:
        """Start anew for the ranks of a cycle."""
        self._cycle = _OfCycle(record, met.group_rank, met.world_size)
        self._known = {name: budget_rule.begin_cycle(known) for name, known in self._known.items()}
        for text in self._lines_of_next_cycle:
            turn.say_for_all(text)
        self._lines_of_next_cycle.clear()

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next ``go_on``."""
        survey = None if self._cycle is None else self._cycle.survey
        file = self._file
        return earliest(
            None if survey is None else survey.until_ns,
            None if file is None or file.is_read else file.until_ns,
        )

    def go_on(self, turn: Step) -> None:
        """Answer a survey, or give up on a file, when that is due."""
        file, cycle = self._file, self._cycle
        if file is not None and not file.is_read and turn.now_ns >= file.until_ns:
            text = f"{file.path}: the file system has not answered for {READ_NS / 1e9:.0f} s"
            self._was_read(edge.StateRead(file.path, None, text, may_write=False), turn)
        if cycle is not None and cycle.survey is not None:
            # an exited rank doesn't answer any more; its earlier answers still count
            cycle.survey.awaited -= cycle.record.exits.keys()
            if not cycle.survey.awaited or turn.now_ns >= cycle.survey.until_ns:
                self._answer(cycle, cycle.survey.survey, turn)
                cycle.survey = None
        if cycle is not None:
            self._tell_end(cycle, turn)

    # -- events -------------------------------------------------------------------------------------------------

    def hear(self, event: edge.Event, turn: Step) -> None:
        """Take an event; events of earlier cycles, or unrelated to learning, are ignored."""
        match event:
            case edge.StateRead():
                self._was_read(event, turn)
            case edge.StateWritten():
                self._was_written(event, turn)
        cycle = self._cycle
        if cycle is None:
            return
        match event:
            case MonitorReport(local_rank, report) if report.cycle == cycle.record.cycle:
                self._hear_monitor(local_rank, report, cycle, turn)
            case Survey(of) if of == cycle.record.cycle:
                self._asked(event, cycle, turn)
            case Learned(of) if of == cycle.record.cycle:
                self._learned(event, cycle, turn)
            case Raised(of, name) if of == cycle.record.cycle:
                self._raise(name, cycle, turn)

    def _hear_monitor(self, local_rank: int, report: RankReport, cycle: _OfCycle, turn: Step) -> None:
        match report:
            case Attached(watch_only=False):
                self._attached(local_rank, report, cycle, turn)
            case Milestone():
                self._reached(local_rank, report, cycle, turn)
            case Intervals():
                self._reported_intervals(local_rank, report, cycle)

    def killed(self, name: str, turn: Step) -> None:
        """Double a learned timeout that has ended a rank of this node, and tell the others."""
        cycle = self._cycle
        if cycle is not None and name not in cycle.raised:
            turn.do(Raised(cycle.record.cycle, name))
            self._raise(name, cycle, turn)

    def reported(self, name: str, turn: Step) -> None:
        """Double a report-only timeout that was exceeded: a slower job is reported once."""
        cycle, before = self._cycle, self._reported.get(name)
        if cycle is None or before is None:
            return
        self._known[name] = budget_rule.after_kill(self._known.get(name, Known(reference_s=before.timeout_s)))
        doubled = self._apply_rule(name, self._known[name])
        if doubled is not None:
            self._reported[name] = doubled
            self._arm_running(cycle, turn)

    def _attached(self, local_rank: int, event: Attached, cycle: _OfCycle, turn: Step) -> None:
        self._script_learns = self._script_learns or event.learns
        if event.state_path and self._file is None:
            self._file = _StateFile(event.state_path, turn.now_ns + READ_NS)
            turn.do(ReadState(event.state_path, sets_aside=cycle.place == 0 and self._enforces))
        elif event.state_path and self._file is not None and event.state_path != self._file.path:
            rank = cycle.record.ranks[local_rank]
            self._say_once(lines.other_state_file(rank, event.state_path, self._file.path), turn)
        self._arm([local_rank], turn)
        self._say_what_is_off_without_file(local_rank, turn)

    def _reached(self, local_rank: int, milestone: Milestone, cycle: _OfCycle, turn: Step) -> None:
        self._say_what_is_off_without_file(local_rank, turn)  # its hooks have added sections since it attached
        if milestone.moment is Moment.END:
            cycle.ended.add(local_rank)
        elif milestone.count > cycle.told.get(milestone.moment, -1):
            cycle.told[milestone.moment] = milestone.count
            turn.do(replace(milestone, cycle=cycle.record.cycle))

    def _tell_end(self, cycle: _OfCycle, turn: Step) -> None:
        """Tell the end of the run, once, when no rank with hooks is in it any more."""
        record, end = cycle.record, Milestone(cycle.record.cycle, Moment.END)
        if not cycle.ended or end.moment in cycle.told:
            return
        boards = turn.seen.boards
        closed = {each for each in record.hooked if (board := boards[each]) is not None and board.closing}
        if not (record.running & record.hooked) - cycle.ended - closed:
            cycle.told[end.moment] = end.count
            turn.do(end)

    # -- surveys ------------------------------------------------------------------------------------------------

    def _asked(self, survey: Survey, cycle: _OfCycle, turn: Step) -> None:
        awaited = cycle.record.running & cycle.record.hooked
        cycle.survey = _NodeSurvey(survey, turn.now_ns + ANSWER_NS, awaited)
        turn.do(*(OrderMonitor(local_rank, survey) for local_rank in sorted(awaited)))

    def _reported_intervals(self, local_rank: int, intervals: Intervals, cycle: _OfCycle) -> None:
        before = cycle.answers.get(local_rank)
        if before is None or intervals.number >= before.number:
            cycle.answers[local_rank] = intervals
        if cycle.survey is not None and intervals.number == cycle.survey.survey.number:
            cycle.survey.awaited.discard(local_rank)

    def _answer(self, cycle: _OfCycle, survey: Survey, turn: Step) -> None:
        exits = cycle.record.exits
        answers = [_as_ended(each) if rank in exits else each for rank, each in sorted(cycle.answers.items())]
        facts = Facts()
        for each in answers:
            facts = any_of(facts, each.facts)
        names = dict.fromkeys(name for each in answers for name in each.sketches)
        sketches = {name: merge(each.sketches[name] for each in answers if name in each.sketches) for name in names}
        answer = Intervals(cycle.record.cycle, survey.number, sketches, facts)
        if cycle.place == 0:
            answer = replace(answer, **self._place_0())
        turn.do(answer)

    def _place_0(self) -> dict[str, Any]:
        options = self._options
        is_unread = self._file is not None and not self._file.is_read
        return {
            "known": None if is_unread else dict(self._known),
            "configured": tuple(options.configured_sections),
            "caps": options.caps,
            "previous": {
                name: max(each.timeout_s, budget_rule.LEARNED_FLOOR_S)
                for name, each in {**self._reported, **self._state.timeouts}.items()
            },
            "rule": options.rule,
            "factor": options.safety_factor,
            "mode": options.learn,
        }

    def _learned(self, event: Learned, cycle: _OfCycle, turn: Step) -> None:
        event = self._with_late_kills(event, cycle)
        self._known.update(event.known)
        if event.enforces:
            self._keep(event, cycle)
            self._say_changes(event, turn)
        elif self._options.learn != "off":
            self._reported.update(event.timeouts)
        self._say_unopened(event, cycle, turn)
        cycle.is_over |= event.moment is Moment.END
        if event.timeouts:
            self._arm_running(cycle, turn)
        if cycle.place == 0:
            is_writing = event.writes and self._write(turn, event.moment)
            if event.enforces and event.timeouts:
                origins = {name: _origin(each, self._options.rule) for name, each in event.timeouts.items()}
                turn.do(Write(TimeoutsLearned(timeouts=origins)))
            if event.moment is Moment.END and not is_writing:
                turn.do(TellStateWritten(STATE_NOT_WRITTEN))

    def _with_late_kills(self, event: Learned, cycle: _OfCycle) -> Learned:
        """Double again what a kill has doubled after the coordinator was told what this launcher knew."""
        timeouts, known = dict(event.timeouts), dict(event.known)
        for name in cycle.raised & known.keys() & self._known.keys():
            own, told = self._apply_rule(name, self._known[name]), timeouts.get(name)
            if own is not None and told is not None and told.raised < 0.75 * own.raised:
                known[name] = budget_rule.after_kill(known[name])
                again = self._apply_rule(name, known[name]) or own
                timeouts[name] = replace(again, max_observed_s=told.max_observed_s, rank_of_max=told.rank_of_max)
        return replace(event, timeouts=timeouts, known=known)

    def _apply_rule(self, name: str, known: Known) -> LearnedTimeout | None:
        options = self._options
        before = self._state.timeouts.get(name)
        return budget_rule.learn(
            known,
            Sketch(),
            factor=options.safety_factor,
            rule=options.rule,
            cap_s=options.caps.get(name),
            previous_s=None if before is None else before.timeout_s,
        )

    # -- kills --------------------------------------------------------------------------------------------------

    def _raise(self, name: str, cycle: _OfCycle, turn: Step) -> None:
        if name in cycle.raised:
            return
        cycle.raised.add(name)
        self._factors[name] = min(2.0 * self._factors.get(name, 1.0), _MOST_FACTOR)
        before = self._state.timeouts.get(name)
        text = lines.raised(name, self._factors[name])
        if before is not None:
            options = self._options
            self._state = learned.state_after_kill(
                replace(self._state, known={**self._state.known, **self._known}),
                name,
                factor=options.safety_factor,
                rule=options.rule,
                configured=options.configured,
            )
            self._known[name] = self._state.known[name]
            self._choose()
            text = lines.raised_to(name, self._state.timeouts[name].timeout_s, before.timeout_s)
        elif name in self._known:
            self._known[name] = budget_rule.after_kill(self._known[name])
        self._lines_of_next_cycle.append(text)
        self._arm_running(cycle, turn)
        file = self._file
        if cycle.place == 0 and file is not None and (file.existed or self._enforces):
            self._write(turn, None)

    # -- the file -----------------------------------------------------------------------------------------------

    def _was_read(self, event: edge.StateRead, turn: Step) -> None:
        file = self._file
        if file is None or file.is_read or event.path != file.path:
            return  # it was given up
        file.is_read, file.may_write, file.existed = True, event.may_write, event.state is not None
        if event.problem:
            self._say_once_for_all(event.problem, turn)
        if event.state is not None:
            self._load(event.state, file.path, turn)
        self._say_what_is_off(turn)
        cycle = self._cycle
        if cycle is not None:
            self._arm(cycle.record.running & cycle.record.hooked, turn)

    def _load(self, state: LearnedState, path: str, turn: Step) -> None:
        cycle = self._cycle
        self._state = state
        self._known = {name: budget_rule.begin_cycle(known) for name, known in state.known.items()}
        choice = self._choose()
        for superseded in choice.superseded:
            turn.say_for_all(superseded.describe())
        if choice.is_empty:
            return
        turn.say_for_all(lines.timeouts_loaded(path, choice.timeouts))
        world_size = 0 if cycle is None else cycle.world_size
        difference = learned.describe_difference(state, world_size=world_size)
        if difference is not None:
            turn.say_for_all(f"timeouts loaded from {path}: {difference}")
        if cycle is not None and cycle.place == 0:
            loaded = StateLoaded(
                path=path,
                timeouts=choice.timeouts,
                superseded=tuple(each.name for each in choice.superseded),
                world_size=state.world_size,
            )
            turn.do(Write(loaded))

    def _write(self, turn: Step, moment: Moment | None) -> bool:
        """Write the file if permitted. Return False if it isn't."""
        file = self._file
        if file is None or not file.is_read or not file.may_write:
            return False
        file.existed = True
        turn.do(WriteState(file.path, self._state, moment))
        return True

    def _was_written(self, event: edge.StateWritten, turn: Step) -> None:
        if event.problem:
            self._say_once(event.problem, turn)
        if event.moment is Moment.END:
            turn.do(TellStateWritten(STATE_WRITTEN if event.ok else STATE_NOT_WRITTEN))

    # -- what is in force ---------------------------------------------------------------------------------------

    def _keep(self, event: Learned, cycle: _OfCycle) -> None:
        self._state = learned.state_after(
            self._state,
            event,
            configured=self._options.configured,
            world_size=cycle.world_size,
            written_at_unix_s=0.0,  # set by the thread that writes the file
        )
        self._choose()

    def _choose(self) -> Choice:
        self._choice = learned.choose(self._state, configured=self._options.configured)
        return self._choice

    def _armed(self) -> dict[str, Armed]:
        configured = self._options.configured
        reported = learned.armed(self._reported, configured=configured, enforced=False)
        return {**reported, **learned.armed(self._choice.learned, configured=configured, enforced=True)}

    def _arm(self, local_ranks: Iterable[int], turn: Step) -> None:
        cycle, timeouts = self._cycle, self._armed()
        if cycle is not None and (timeouts or self._factors):
            arm = Arm(cycle.record.cycle, timeouts, dict(self._factors))
            turn.do(*(OrderMonitor(local_rank, arm) for local_rank in sorted(local_ranks)))

    def _arm_running(self, cycle: _OfCycle, turn: Step) -> None:
        """Arm the monitors of all ranks anew, until the run is over."""
        if not cycle.is_over:
            self._arm(cycle.record.running & cycle.record.hooked, turn)

    @property
    def _enforces(self) -> bool:
        return enforces(Facts(learns=self._script_learns), self._options.learn)

    # -- lines --------------------------------------------------------------------------------------------------

    def _say_once(self, text: str, turn: Step) -> None:
        if text not in self._said:
            self._said.add(text)
            turn.do(Say(text))

    def _say_once_for_all(self, text: str, turn: Step) -> None:
        if text not in self._said:
            self._said.add(text)
            turn.say_for_all(text)

    def _say_what_is_off_without_file(self, local_rank: int, turn: Step) -> None:
        board = turn.seen.boards[local_rank]
        if self._file is None and board is not None and board.sections:
            self._say_what_is_off(turn)  # otherwise once the file was read

    def _say_what_is_off(self, turn: Step) -> None:
        configured = self._options.configured
        is_timed = bool(self._options.caps) or any(
            configured.get(each) is not None for each in learned.HEARTBEAT_FIELDS
        )
        if is_timed or not self._choice.is_empty or self._enforces:
            return
        is_off = self._options.learn == "off"
        self._say_once_for_all(lines.NOTHING_IS_DETECTED if is_off else lines.NOTHING_IS_KILLED, turn)

    def _say_changes(self, event: Learned, turn: Step) -> None:
        changed = {name: each for name, each in event.timeouts.items() if _is_worth_a_line(each)}
        if changed:
            turn.say_for_all(lines.timeouts_updated(changed))
        for reason in event.reasons:
            self._say_once_for_all(reason, turn)

    def _say_unopened(self, event: Learned, cycle: _OfCycle, turn: Step) -> None:
        steps = None if event.moment is Moment.END else cycle.told.get(Moment.STEPS)
        timed = {*self._options.caps, *self._choice.timeouts}
        untimed = "are not detected" if self._options.learn == "off" and not self._enforces else "are only reported"
        for name, meant in event.unopened.items():
            if f"unopened {name}" not in self._said:
                self._said.add(f"unopened {name}")
                what = "" if meant in timed else untimed
                turn.say_for_all(lines.never_opened(name, meant, steps=steps, untimed=what))


def _as_ended(intervals: Intervals) -> Intervals:
    """Return the last answer of a rank that has exited: nothing is open any more."""
    sketches = {name: msgspec.structs.replace(each, open_s=NO_INTERVAL) for name, each in intervals.sketches.items()}
    return replace(intervals, sketches=sketches, facts=replace(intervals.facts, setup_open=False))


def _is_worth_a_line(found: LearnedTimeout) -> bool:
    before = found.previous_s
    return before is None or abs(found.timeout_s - before) > _WORTH_A_LINE * before


def _origin(learned_now: LearnedTimeout, rule: str) -> TimeoutOrigin:
    longest_s = learned_now.max_observed_s
    return TimeoutOrigin(
        timeout_s=learned_now.timeout_s,
        previous_s=learned_now.previous_s,
        max_observed_s=longest_s,
        rank_of_max=learned_now.rank_of_max,
        margin_s=None if longest_s is None else learned_now.timeout_s - longest_s,
        rule=rule,
        first_s=learned_now.first_s,
    )
