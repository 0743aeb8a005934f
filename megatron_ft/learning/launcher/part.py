"""The launcher's part of learning. Pure.

All launchers keep what was learned, so that any of them can be at place 0 in the next cycle: that one writes the file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.config.config import ConfigValues
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.learning.gathering import OF_RANKS_S, Gathering
from megatron_ft.learning.messages import Arm, Intervals, Killed, Observed
from megatron_ft.learning.rule import REPORT_FLOOR_S, reasons_against
from megatron_ft.learning.timeouts import LearnedState, StateFile, configured_of, floored, that_applies
from megatron_ft.link.base.launcher_part import LauncherPart, PartEffect
from megatron_ft.link.base.layout import FACT_HOOKS, FACT_LEARNS, STATE_NOT_WRITTEN, STATE_WRITTEN
from megatron_ft.link.facts.monitor import Attached

_KILLS_NOT = "no timeouts configured: hangs are reported, not killed (set timeouts or --ft-learn on to kill)"
_DETECTS_NOT = "no timeouts configured, learning is off: hangs are not detected by sections"
_NO_HOOKS = (
    "no timeouts are learned from a script that calls RankMonitorClient itself: it does that with "
    "calculate_and_set_section_timeouts() or calculate_and_set_hb_timeouts()"
)


@dataclass(frozen=True, slots=True)
class TellStateWritten(PartEffect):
    """Tell the ranks of this node what became of the last timeouts: a STATE_ value of `link.base.layout`."""

    value: int


class LauncherLearning(LauncherPart):
    """The part of one launcher, for the whole job."""

    HEARS = Intervals | Killed | StateFile

    def __init__(self, options: ConfigValues) -> None:
        self._options = options
        self.configured = configured_of(options.to_dict())
        self._ranks: NodeCycle
        self._gathering = Gathering(-1, OF_RANKS_S)
        self._last = Intervals(0)
        """Last maxima of the job in this cycle. Once its run is over, what is learned is for the next one: ranks may do
        something else now."""
        self._path = ""
        """File of learned timeouts that the first rank of this node has named."""
        self._may_write: bool | None = None  # not known before the file was read
        self._state = LearnedState()
        """What was learned, and applies under today's configuration."""
        self._script_learns = False
        self._killed: dict[int, set[str]] = {}
        """Names of the learned timeouts that have ended ranks, by cycle."""
        self._said: set[str] = set()

    @property
    def alarm_ns(self) -> int | None:
        due_s = self._gathering.due_s
        return None if due_s is None else int(due_s * 1e9) + 1

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._ranks = cycle
        self._gathering, self._last = Gathering(cycle.cycle, OF_RANKS_S), Intervals(cycle.cycle)

    def tick(self, turn: Turn, *, is_stopping: bool) -> None:
        """Tell the leader the longest intervals of this node, when that is due."""

        def in_run() -> list[int]:
            boards = {each: turn.board(each) for each in self._ranks.hooked & self._ranks.running}
            return [each for each, board in boards.items() if board is None or not board.closing]

        if (result := self._gathering.take(in_run, turn.now_s)) is not None:
            turn.do(result)

    def hear(self, event: Intervals | Killed | StateFile, turn: Turn) -> None:
        """Take a message of the leader, or about the file; the leader's on other cycles are ignored."""
        match event:
            case StateFile(document=None):
                self._was_read(event, turn)
            case StateFile():
                self._say_once(event.problem, turn)
                if event.at_end:
                    turn.do(TellStateWritten(STATE_NOT_WRITTEN if event.problem else STATE_WRITTEN))
            case Intervals() if event.cycle == self._ranks.cycle:
                self._learn(event, turn)
            case Killed() if event.cycle == self._ranks.cycle:
                self.killed(event, turn, is_own=False)

    def hear_monitor(self, local_rank: int, report: object, turn: Turn) -> None:
        """Take a monitor's report; others than those of learning, and those on other cycles, are ignored."""
        if getattr(report, "cycle", None) != self._ranks.cycle:
            return
        if isinstance(report, Attached) and not report.watch_only:
            self._script_learns |= report.learns
            if report.state_path and not self._path:
                self._path = report.state_path
                turn.do(StateFile(self._path))
            self._arm(turn, [local_rank])
        elif isinstance(report, Intervals):
            self._gathering.hear(local_rank, report, turn.now_s)
        else:
            return
        board = turn.board(local_rank)  # its hooks may have added sections since it attached
        if not self._path and board is not None and board.sections:
            self._say_what_is_off(turn)

    def _learn(self, result: Intervals, turn: Turn) -> None:
        """Learn from the maxima of all nodes what may be learned now; name changes of more than a hundredth."""
        is_at_save = result.ended or result.reached[0] > self._last.reached[0]
        self._last = result
        self._script_learns |= bool(result.facts & FACT_LEARNS)
        before, seen = self._in_force(), dict[str, Observed]()
        is_off = self._options.learn == "off" and not self._enforces
        if self._enforces and not is_at_save:  # enforced timeouts are learned at saves and at the end
            self._say_once("" if result.facts & FACT_HOOKS else _NO_HOOKS, turn)
        elif not is_off and (not self._path or self._may_write is not None):
            reasons = reasons_against(result.facts, is_closing=result.ended)
            for reason in reasons.values() if self._enforces else ():
                self._say_once(reason, turn)
            # a job that comes to the same long interval again is to pass it: until the end its timeout stays as it is
            killed = () if result.ended else self._killed.get(result.cycle - 1, ())
            names = [name for name, reason in reasons.items() if not reason and name not in killed]
            seen = {name: each for name in names if (each := result.seen.get(name, Observed())).count}
        if seen:
            self._state = self._state.learn(seen, self._options.safety_factor)
            self._arm(turn)
        now, changes = self._in_force(), list[str]()
        for name, each in seen.items() if self._enforces else ():
            was_s = before.get(name, 0.0)
            if abs(now[name] - was_s) > 0.01 * was_s:
                was = f"was {was_s:.4g} s; " if was_s else ""
                longest = f"the longest took {each.longest_s:.4g} s, in rank {each.rank}"
                changes.append(f"{name} {now[name]:.4g} s ({was}{longest})")
        if changes:
            turn.say_for_all(f"timeouts updated: {'; '.join(changes)}")
        is_written = bool(seen) and self._write(turn, at_end=result.ended)
        if self._ranks.place == 0 and result.ended and not is_written:
            turn.do(TellStateWritten(STATE_NOT_WRITTEN))

    def killed(self, kill: Killed, turn: Turn, *, is_own: bool = True) -> None:
        """Note that a learned timeout has ended a rank; ``is_own``: one of this node, and the others are to hear of it.

        Double it if it was wrong in all likelihood. A real hang doesn't come back after the restart.
        """
        name, known = kill.name, self._killed.setdefault(kill.cycle, set())
        if name in known:
            return
        known.add(name)
        if is_own:
            turn.do(kill)
        if kill.moved or name in self._killed.get(kill.cycle - 1, ()):
            self._double(name, kill.timeout_s, turn)
            why = "although ranks made progress" if kill.moved else "again"
            now = f"{self._in_force()[name]:.4g} s now, was {kill.timeout_s:.4g} s"
            turn.say_for_all(f"the timeout of '{name}' terminated a rank {why}: it is {now}")
            self._write(turn)

    def reported(self, name: str, turn: Turn) -> None:
        """Double a report-only timeout that was exceeded: a slower job is reported once."""
        if timeout_s := self._in_force().get(name):
            self._double(name, timeout_s, turn)

    def _double(self, name: str, timeout_s: float, turn: Turn) -> None:
        self._state = self._state.doubled(name, timeout_s, self.configured)
        self._arm(turn)

    def _was_read(self, event: StateFile, turn: Turn) -> None:
        self._may_write = not event.problem
        self._say_once(event.problem, turn)
        if event.state is not None:
            self._state, superseded = that_applies(event.state, self.configured)
            for line in superseded:
                self._say_once(line, turn)
            if timeouts := self._in_force():
                told = ", ".join(f"{name} {timeout_s:.4g} s" for name, timeout_s in timeouts.items())
                follows = "" if self._enforces else " (reported only)"
                self._say_once(f"timeouts loaded from {self._path}: {told}{follows}", turn)
        self._say_what_is_off(turn)
        self._arm(turn)

    def _write(self, turn: Turn, *, at_end: bool = False) -> bool:
        """Write the file if this node is to, and may. Return False if it isn't."""
        writes = self._enforces and self._ranks.place == 0 and bool(self._may_write)
        if writes:
            document = self._state.document(self.configured, self._options.learned_floor)
            turn.do(StateFile(self._path, document, at_end))
        return writes

    # -- what is in force ---------------------------------------------------------------------------------------

    @property
    def _enforces(self) -> bool:
        """True if ranks may be terminated by what is learned: the script or the user asks for it."""
        return self._script_learns or self._options.learn == "on"

    def _in_force(self) -> dict[str, float]:
        is_off = self._options.learn == "off" and not self._enforces  # a file that was left arms no rank
        floor_s = self._options.learned_floor if self._enforces else REPORT_FLOOR_S
        return {} if is_off else floored(self._state.timeouts, floor_s)

    def _arm(self, turn: Turn, local_ranks: Collection[int] | None = None) -> None:
        """Arm the monitors of these ranks, or of all; of none in a run that is over, which may do something else."""
        ranks = self._ranks
        if (timeouts := self._in_force()) and (local_ranks or not self._last.ended):
            turn.order(local_ranks or ranks.running & ranks.hooked, Arm(ranks.cycle, timeouts, self._enforces))

    def _say_once(self, text: str, turn: Turn) -> None:
        if text and text not in self._said:
            self._said.add(text)
            turn.say_for_all(text)

    def _say_what_is_off(self, turn: Turn) -> None:
        """Say that nothing is killed or detected, if so."""
        if not self._enforces and all(each is None for each in self.configured.values()):
            self._say_once(_DETECTS_NOT if self._options.learn == "off" else _KILLS_NOT, turn)
