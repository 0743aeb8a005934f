"""The launcher's part of learning: the file is read once, monitors are armed, asked, and armed again. Pure.

Monitors report milestones and intervals of their ranks, and apply the timeouts this part arms. All launchers keep what
was learned, so that any of them can be at place 0 in the next cycle: that one writes the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_ft.core.board.intervals import CHECKPOINTING, SECTIONS, WARMUP
from megatron_ft.core.board.layout import STATE_NOT_WRITTEN, STATE_WRITTEN, BoardSnapshot
from megatron_ft.core.errors import near
from megatron_ft.core.facts.monitor import Attached
from megatron_ft.core.facts.rank import StateLoaded, TimeoutOrigin, TimeoutsLearned
from megatron_ft.core.times import earliest
from megatron_ft.core.wording import counted
from megatron_ft.learning.messages import (
    Arm,
    Armed,
    Intervals,
    Killed,
    Milestone,
    Moment,
    Observed,
    Survey,
    merge,
)
from megatron_ft.learning.rule import REPORT_FLOOR_S, select
from megatron_ft.learning.state import (
    HEARTBEAT_FIELDS,
    OUT_FIELD,
    SECTIONS_FIELD,
    LearnedState,
    configured_s,
    that_applies,
)
from megatron_ft.learning.timeouts import OUT_OF_SECTION

READ_NS = 30_000_000_000
"""Longest wait for the file server."""
ANSWER_NS = 1_000_000_000
"""Longest wait for monitors in a survey; slower ones are left out of the answer."""
UNOPENED_STEPS = 10
"""After this many steps a section that no rank has opened is probably misspelt."""
_OPENED_LATE = (CHECKPOINTING, WARMUP, OUT_OF_SECTION)
"""A save may be an hour away, and "warmup" is never opened."""
_MOST_UNOPENED = 16
_WORTH_A_LINE = 0.01
_KILLS_NOT = "no timeouts configured: hangs are reported, not killed (set timeouts or --ft-learn on to kill)"
_DETECTS_NOT = "no timeouts configured, learning is off: hangs are not detected by sections"
_NO_HOOKS = (
    "no timeouts are learned from a script that calls RankMonitorClient itself: it does that with "
    "calculate_and_set_section_timeouts() or calculate_and_set_hb_timeouts()"
)


@dataclass(frozen=True)
class LearningOptions:
    """The user's options.

    Args:
        mode: "off", "report" or "on".
        factor: learned timeout as a multiple of the longest interval.
        floor_s: least learned timeout that terminates a rank.
        configured: those of `state.CONFIGURED_FIELDS` that the user has set.
    """

    mode: str = "report"
    factor: float = 5.0
    floor_s: float = 60.0
    configured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sections(self) -> Mapping[str, float | None]:
        """Sections that the user has configured, each with its timeout."""
        sections: Mapping[str, float | None] = self.configured.get(SECTIONS_FIELD) or {}
        return sections

    @property
    def timed(self) -> set[str]:
        """Sections, and OUT_OF_SECTION, that have a configured timeout."""
        timed = {name for name, timeout_s in self.sections.items() if timeout_s is not None}
        return timed | ({OUT_OF_SECTION} if self.configured.get(OUT_FIELD) is not None else set())


# -- the file: effects, and their results -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the file of learned timeouts; answered by ``StateRead``. ``sets_aside``: rename a broken file."""

    path: str
    sets_aside: bool = False


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write the file of learned timeouts; answered by ``StateWritten``. ``moment``: None after a kill."""

    path: str
    state: LearnedState
    moment: Moment | None = None


@dataclass(frozen=True, slots=True)
class StateRead:
    """Answer to ``ReadState``. ``state``: None if there is no usable file.

    ``problem``: what is wrong with the file, in a line; ``may_write``: this run may write it.
    """

    path: str
    state: LearnedState | None
    problem: str = ""
    may_write: bool = True


@dataclass(frozen=True, slots=True)
class StateWritten:
    """Answer to ``WriteState``. ``problem``: why the file could not be written, in a line."""

    ok: bool
    problem: str = ""
    moment: Moment | None = None


@dataclass(frozen=True, slots=True)
class TellStateWritten:
    """Tell the ranks of this node what became of the last timeouts: a STATE_ value of `core.board.layout`."""

    value: int


# -- what the part is given -------------------------------------------------------------------------------------


class Ranks(Protocol):
    """The ranks of this node in one cycle, by local rank."""

    cycle: int
    ranks: Sequence[int]
    hooked: set[int]

    @property
    def running(self) -> set[int]: ...


class Turn(Protocol):
    """One event, and what follows from it."""

    now_ns: int

    def do(self, *effects: Any) -> None: ...
    def say(self, text: str) -> None: ...
    def say_for_all(self, text: str) -> None: ...
    def write(self, record: Any) -> None: ...
    def order(self, local_ranks: Iterable[int], order: Any) -> None: ...
    def board(self, local_rank: int) -> BoardSnapshot | None: ...


@dataclass
class _File:
    """File of learned timeouts that the first rank of this node has named."""

    path: str
    until_ns: int
    """Deadline for reading it."""
    is_read: bool = False
    may_write: bool = False


@dataclass
class _Cycle:
    """Part of one cycle. ``place`` is that of this node among all."""

    of: Ranks
    place: int
    world_size: int
    told: dict[Moment, int] = field(default_factory=dict)
    survey: Survey | None = None
    until_ns: int = 0
    awaited: set[int] = field(default_factory=set)
    answers: dict[int, Intervals] = field(default_factory=dict)
    """Newest answer of each rank, by local rank; it includes all older ones."""
    ended: set[int] = field(default_factory=set)
    """Local ranks whose run is over."""
    has_other_file: bool = False
    """True once a rank has named another file than the one in use."""
    is_over: bool = False
    """True once the run has ended: what is learned then is for the next run, as ranks may do something else now."""

    @property
    def armed(self) -> set[int]:
        """Local ranks whose monitors are armed."""
        return set() if self.is_over else self.of.running & self.of.hooked


class LauncherLearning:
    """The part of one launcher, for the whole job."""

    def __init__(self, options: LearningOptions) -> None:
        self._options = options
        self._cycle: _Cycle | None = None
        self._file: _File | None = None
        self._state = LearnedState()
        """What was learned, and applies under today's configuration."""
        self._script_learns = False
        self._killed: dict[int, set[str]] = {}
        """Names of the learned timeouts that have ended ranks, by cycle."""
        self._lines_of_next_cycle: list[str] = []
        self._said: set[str] = set()

    @property
    def due_ns(self) -> int | None:
        """Latest time of the next ``tick``."""
        cycle, file = self._cycle, self._file
        return earliest(
            None if cycle is None or cycle.survey is None else cycle.until_ns,
            None if file is None or file.is_read else file.until_ns,
        )

    @property
    def _enforces(self) -> bool:
        """True if ranks may be terminated by what is learned: the script or the user asks for it."""
        return self._script_learns or self._options.mode == "on"

    # -- the life of a cycle ------------------------------------------------------------------------------------

    def begin(self, ranks: Ranks, turn: Turn, *, place: int, world_size: int) -> None:
        """Start anew for the ranks of a cycle."""
        self._cycle = _Cycle(ranks, place, world_size)
        for text in self._lines_of_next_cycle:
            turn.say_for_all(text)
        self._lines_of_next_cycle.clear()

    def tick(self, turn: Turn) -> None:
        """Answer a survey, or give up on a file, when that is due."""
        file, cycle = self._file, self._cycle
        if file is not None and not file.is_read and turn.now_ns >= file.until_ns:
            text = f"{file.path}: the file system has not answered for {READ_NS / 1e9:.0f} s"
            self._was_read(StateRead(file.path, None, text, may_write=False), turn)
        if cycle is None:
            return
        if cycle.survey is not None:
            # an exited rank doesn't answer any more; its earlier answers still count
            cycle.awaited &= cycle.of.running
            if not cycle.awaited or turn.now_ns >= cycle.until_ns:
                turn.do(merge(cycle.survey, (each for _, each in sorted(cycle.answers.items()))))
                cycle.survey = None
        # the end of the run is told once, when no rank with hooks is in it any more
        if cycle.ended and Moment.END not in cycle.told:
            boards = {each: turn.board(each) for each in cycle.of.running & cycle.of.hooked}
            if all(each in cycle.ended or (board is not None and board.closing) for each, board in boards.items()):
                cycle.told[Moment.END] = 0
                turn.do(Milestone(cycle.of.cycle, Moment.END))

    def hear(self, message: Survey | Intervals | Killed | StateRead | StateWritten, turn: Turn) -> None:
        """Take a message of the leader, or about the file; the leader's on other cycles are ignored."""
        match message:
            case StateRead():
                self._was_read(message, turn)
                return
            case StateWritten(ok, problem, moment):
                if problem:
                    self._say_once(problem, turn.say)
                if moment is Moment.END:
                    turn.do(TellStateWritten(STATE_WRITTEN if ok else STATE_NOT_WRITTEN))
                return
        cycle = self._cycle
        if cycle is None or message.cycle != cycle.of.cycle:
            return
        match message:
            case Survey():
                cycle.survey, cycle.until_ns = message, turn.now_ns + ANSWER_NS
                cycle.awaited = cycle.of.running & cycle.of.hooked
                turn.order(cycle.awaited, message)
            case Intervals():
                self._surveyed(message, cycle, turn)
            case Killed(name=name, moved=moved):
                self._heard_of_kill(name, cycle, turn, moved=moved)

    def hear_monitor(self, local_rank: int, report: object, turn: Turn) -> None:
        """Take a monitor's report; others than those of learning, and those on other cycles, are ignored."""
        cycle = self._cycle
        if cycle is None or getattr(report, "cycle", None) != cycle.of.cycle:
            return
        match report:
            case Attached(watch_only=False):
                self._attached(local_rank, report, cycle, turn)
            case Milestone(moment=moment, count=count):
                self._say_what_is_off(local_rank, turn)  # its hooks have added sections since it attached
                if moment is Moment.END:
                    cycle.ended.add(local_rank)
                elif count > cycle.told.get(moment, -1):
                    cycle.told[moment] = count
                    turn.do(report)
            case Intervals(number=number):
                before = cycle.answers.get(local_rank)
                if before is None or number >= before.number:
                    cycle.answers[local_rank] = report
                if cycle.survey is not None and number == cycle.survey.number:
                    cycle.awaited.discard(local_rank)

    def _surveyed(self, result: Intervals, cycle: _Cycle, turn: Turn) -> None:
        """Learn from the maxima of all nodes what may be learned now."""
        self._script_learns |= result.facts.learns
        self._say_unopened(result, cycle, turn)
        cycle.is_over |= result.moment is Moment.END
        seen, before = self._learnable(result, turn), self._in_force()
        if seen:
            # a job that comes to the same long interval again is to pass it: until then saves don't halve the timeout
            again = () if result.moment is Moment.END else self._killed.get(cycle.of.cycle - 1, ())
            self._state = replace(
                self._state.learn(seen, self._options.factor, again),
                configured=self._options.configured,
                world_size=cycle.world_size,
            )
            self._arm(cycle.armed, turn)
        if self._enforces:
            self._say_changes(before, seen, turn)
            if seen and cycle.place == 0:
                turn.write(TimeoutsLearned(timeouts=self._origins(before, seen)))
        is_writing = bool(seen) and self._write(turn, result.moment)
        if cycle.place == 0 and result.moment is Moment.END and not is_writing:
            turn.do(TellStateWritten(STATE_NOT_WRITTEN))

    def _learnable(self, result: Intervals, turn: Turn) -> dict[str, Observed]:
        """Return the intervals that make timeouts now."""
        facts = result.facts
        is_unread = self._file is not None and not self._file.is_read
        if is_unread or (self._options.mode == "off" and not self._enforces):
            return {}
        if self._enforces and result.moment is Moment.STEPS:  # enforced timeouts are learned at saves and at the end
            if not facts.has_hooks:
                self._say_once(_NO_HOOKS, turn.say_for_all)
            return {}
        selection = select(
            loaded=facts.loaded,
            setup_open=facts.setup_open,
            enough_steps=facts.enough_steps,
            saved=facts.saved,
            async_saves=facts.async_saves,
            is_closing=result.moment is Moment.END,
        )
        for reason in selection.reasons if self._enforces else ():
            self._say_once(reason, turn.say_for_all)
        names = [name for name in selection.names if name in result.seen and result.seen[name].count]
        return {name: result.seen[name] for name in names if self._enforces or name not in self._options.timed}

    # -- kills --------------------------------------------------------------------------------------------------

    def killed(self, name: str, turn: Turn, *, moved: bool) -> None:
        """Note that a learned timeout has ended a rank of this node, and tell the others.

        ``moved``: the interval was extended before, because a rank made progress.
        """
        cycle = self._cycle
        if cycle is not None and name not in self._killed.get(cycle.of.cycle, ()):
            turn.do(Killed(cycle.of.cycle, name, moved))
            self._heard_of_kill(name, cycle, turn, moved=moved)

    def reported(self, name: str, turn: Turn) -> None:
        """Double a report-only timeout that was exceeded: a slower job is reported once."""
        if self._cycle is not None and name in self._state.timeouts:
            self._state = self._state.doubled(name)
            self._arm(self._cycle.armed, turn)

    def _heard_of_kill(self, name: str, cycle: _Cycle, turn: Turn, *, moved: bool) -> None:
        """Double the timeout if it was wrong in all likelihood. A real hang doesn't come back after the restart."""
        number = cycle.of.cycle
        is_known = name in self._killed.setdefault(number, set())
        self._killed[number].add(name)
        if is_known or not (moved or name in self._killed.get(number - 1, ())):
            return
        before_s = self._in_force().get(name)
        self._state = self._state.doubled(name)
        now_s, factor = self._in_force().get(name), self._state.raised[name]
        now = (
            f"it is multiplied by {factor:g} now" if now_s is None else f"it is {now_s:.4g} s now, was {before_s:.4g} s"
        )
        why = "although ranks made progress" if moved else "again"
        self._lines_of_next_cycle.append(f"the timeout of '{name}' terminated a rank {why}: {now}")
        self._arm(cycle.armed, turn)
        self._write(turn, None)

    # -- the file -----------------------------------------------------------------------------------------------

    def _attached(self, local_rank: int, event: Attached, cycle: _Cycle, turn: Turn) -> None:
        self._script_learns |= event.learns
        file = self._file
        if event.state_path and file is None:
            self._file = _File(event.state_path, turn.now_ns + READ_NS)
            turn.do(ReadState(event.state_path, sets_aside=cycle.place == 0 and self._enforces))
        elif event.state_path and file is not None and event.state_path != file.path and not cycle.has_other_file:
            cycle.has_other_file = True
            names = f"rank {cycle.of.ranks[local_rank]} names {event.state_path} for learned timeouts"
            self._say_once(f"{names}, {file.path} was named first: using {file.path}", turn.say)
        self._arm([local_rank], turn)
        self._say_what_is_off(local_rank, turn)

    def _was_read(self, event: StateRead, turn: Turn) -> None:
        file, cycle = self._file, self._cycle
        if file is None or file.is_read or event.path != file.path:
            return  # it was given up
        file.is_read, file.may_write = True, event.may_write
        if event.problem:
            self._say_once(event.problem, turn.say_for_all)
        if event.state is not None and cycle is not None:
            self._load(event.state, file.path, cycle, turn)
        self._say_what_is_off(None, turn)
        if cycle is not None:
            self._arm(cycle.armed, turn)

    def _load(self, state: LearnedState, path: str, cycle: _Cycle, turn: Turn) -> None:
        self._state, superseded = that_applies(state, self._options.configured)
        for line in superseded.values():
            turn.say_for_all(line)
        timeouts = self._in_force()
        if not timeouts and self._state.heartbeats is None:
            return
        told = ", ".join(f"{name} {timeout_s:.4g} s" for name, timeout_s in timeouts.items()) or "heartbeats"
        follows = "" if self._enforces else " (reported only)"
        turn.say_for_all(f"timeouts loaded from {path}: {told}{follows}")
        difference = state.difference(cycle.world_size)
        if difference:
            turn.say_for_all(f"timeouts loaded from {path}: {difference}")
        if cycle.place == 0:
            names = tuple(superseded)
            turn.write(StateLoaded(path=path, timeouts=timeouts, superseded=names, world_size=state.world_size))

    def _write(self, turn: Turn, moment: Moment | None) -> bool:
        """Write the file if this node is to, and may. Return False if it isn't."""
        file, cycle = self._file, self._cycle
        if file is None or not file.is_read or not file.may_write or cycle is None or cycle.place != 0:
            return False
        if self._enforces:
            turn.do(WriteState(file.path, self._state, moment))
        return self._enforces

    # -- what is in force ---------------------------------------------------------------------------------------

    def _in_force(self) -> dict[str, float]:
        options = self._options
        return self._state.in_force(options.floor_s if self._enforces else REPORT_FLOOR_S, options.configured)

    def _arm(self, local_ranks: Collection[int], turn: Turn) -> None:
        cycle, enforces, configured = self._cycle, self._enforces, self._options.configured
        if cycle is None:
            return
        # where a learned timeout is only reported, a configured one stays in force
        timeouts = {
            name: Armed(timeout_s, enforces)
            for name, timeout_s in self._in_force().items()
            if enforces or configured_s(configured, name) is None
        }
        if timeouts or self._state.raised:
            turn.order(local_ranks, Arm(cycle.of.cycle, timeouts, self._state.raised))

    def _origins(self, before: Mapping[str, float], seen: Mapping[str, Observed]) -> dict[str, TimeoutOrigin]:
        now = self._in_force()
        return {
            name: TimeoutOrigin(
                timeout_s=now[name],
                previous_s=before.get(name),
                max_observed_s=each.longest_s,
                rank_of_max=each.rank,
                margin_s=now[name] - each.longest_s,
            )
            for name, each in seen.items()
        }

    # -- lines --------------------------------------------------------------------------------------------------

    def _say_once(self, text: str, say: Any) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)

    def _say_what_is_off(self, local_rank: int | None, turn: Turn) -> None:
        """Say that nothing is killed or detected, once the file was read, or a rank with sections names none."""
        if local_rank is not None:
            board = turn.board(local_rank)
            if self._file is not None or board is None or not board.sections:
                return
        options = self._options
        is_timed = options.timed or any(options.configured.get(each) is not None for each in HEARTBEAT_FIELDS)
        if not is_timed and not self._enforces:
            self._say_once(_DETECTS_NOT if options.mode == "off" else _KILLS_NOT, turn.say_for_all)

    def _say_changes(self, before: Mapping[str, float], seen: Mapping[str, Observed], turn: Turn) -> None:
        now, changes = self._in_force(), []
        for name, each in seen.items():
            was_s = before.get(name)
            if was_s is None or abs(now[name] - was_s) > _WORTH_A_LINE * was_s:
                was = "" if was_s is None else f"was {was_s:.4g} s; "
                longest = f"the longest took {each.longest_s:.4g} s, in rank {each.rank}"
                changes.append(f"{name} {now[name]:.4g} s ({was}{longest})")
        if changes:
            turn.say_for_all(f"timeouts updated: {'; '.join(changes)}")

    def _say_unopened(self, result: Intervals, cycle: _Cycle, turn: Turn) -> None:
        """Name configured sections that no rank has opened, each with the one that was probably meant."""
        steps = cycle.told.get(Moment.STEPS, 0)
        if "unopened" in self._said or (result.moment is not Moment.END and steps < UNOPENED_STEPS):
            return
        self._said.add("unopened")
        until = f"in the first {counted(steps, 'iteration')}" if result.moment is not Moment.END else "in this run"
        known = {name for name, each in result.seen.items() if each.is_opened}
        untimed = "are only reported"
        if self._options.mode == "off" and not self._enforces:
            untimed = "are not detected"
        for name in sorted({*self._options.sections} - known - {*_OPENED_LATE})[:_MOST_UNOPENED]:
            line = f"section '{name}' has a timeout, but no rank has opened it {until}"
            meant = near(name, sorted({*known, *SECTIONS} - {name}))
            if meant:
                line += f": did you mean '{meant}'?"
                if meant not in self._options.timed and meant not in self._state.timeouts:
                    line += f" Hangs in '{meant}' {untimed} until it has one"
            turn.say_for_all(line)
