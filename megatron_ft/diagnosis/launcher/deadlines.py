"""Deadlines of ranks that no monitor judges: before their monitoring has begun, and after they have ended it. Pure.

A rank that doesn't start monitoring within ``--ft-startup-timeout`` of its start, or doesn't exit within
``--ft-exit-timeout`` of its shutdown, is terminated as hung, and the restart policy decides. One exception: after its
shutdown a rank may have nothing left to do. If other ranks of the node have exited with 0, none has failed and none is
still at work, a rank that merely doesn't exit is terminated and treated as finished, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import describe_hang, describe_hang_and_iteration
from megatron_ft.diagnosis.hang_messages import Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.diagnosis.root_cause import spans
from megatron_ft.launcher.rules.events import SignalRanks, Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import LATE_NS, Options, Turn
from megatron_ft.learning.timeouts import HEARTBEATS
from megatron_ft.link.base.escalation import Escalation
from megatron_ft.link.base.intervals import SETUP
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.monitor import Attached, Detached
from megatron_ft.link.messages.monitor_messages import Collect, RankReport

_PAUSED_NS = 200_000_000
_NO_HOOKS_S = 120.0
"""Seconds from the start of ranks until it is said which of them are not watched, if "setup" has no timeout."""


@dataclass(kw_only=True)
class _Wait:
    """Deadline for the "startup" or the "exit" (``kind``) of one rank; it was last checked at ``asked_ns``."""

    kind: str
    local_rank: int
    since_ns: int
    timeout_s: float
    asked_ns: int
    due_ns: int
    excused_ns: int = 0


class Deadlines(LauncherPart):
    """Deadlines of the ranks, and the end of those that are late.

    ``pauses``: times in which hang detection is suspended; ``configured``: the user's timeouts.
    """

    def __init__(self, options: Options, configured: Mapping[str, float | None], pauses: Pauses) -> None:
        self._options = options
        self._configured = configured
        self._pauses = pauses
        self._stopped_ns = 0
        """End of the last stop of the whole node."""

    # -- events ---------------------------------------------------------------------------------------------------

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle
        self._waits: dict[int, _Wait] = {}
        self._escalations: dict[int, Escalation] = {}
        """Escalations of ranks that are being ended, or will be once evidence on them has come."""
        self._hooks_due_ns: int | None = None

    def started(self, turn: Turn) -> None:
        timeout_s = self._options.given.startup_timeout
        if timeout_s is None and any(self._configured.values()):
            self._hooks_due_ns = turn.now_ns + round((self._configured.get(SETUP) or _NO_HOOKS_S) * 1e9)
        for local_rank in self._cycle.started.keys() - self._cycle.hooked:
            self._wait("startup", local_rank, self._cycle.started[local_rank].at_ns, timeout_s, turn)

    def hear_monitor(self, local_rank: int, report: RankReport, turn: Turn) -> None:
        cycle, timeout_s = self._cycle, self._options.given.exit_timeout
        if not (cycle.is_started and cycle.has(local_rank, report.cycle)):
            return
        if isinstance(report, Attached) and not report.watch_only:
            self._waits.pop(local_rank, None)  # it has begun its monitoring, maybe for the second time
        elif isinstance(report, Detached) and local_rank not in self._waits:  # a replacement monitor repeats this
            self._wait("exit", local_rank, report.at_ns or turn.now_ns, timeout_s, turn)

    def continued(self, now_ns: int) -> None:
        """Exclude a stop of the whole node.

        The node may have been stopped at any moment since each deadline was last checked: none of that time counts. A
        late timer shows a stop, too, but not one that ends before the timer is due; such a stop delays nothing.
        """
        self._stopped_ns = now_ns
        for wait in self._waits.values():
            self._excuse(wait, now_ns)

    @property
    def alarm_ns(self) -> int | None:
        times = [wait.due_ns for wait in self._waits.values()]
        times += [round(each.due_s * 1e9) for each in self._escalations.values() if each.due_s is not None]
        return earliest(*times, self._hooks_due_ns)

    def tick(self, turn: Turn, *, is_stopping: bool) -> None:
        """Find the ranks that are late, and terminate them. ``is_stopping``: no rank need start any more."""
        for local_rank in self._cycle.exits:
            self._waits.pop(local_rank, None)
            self._escalations.pop(local_rank, None)
        for wait in [wait for wait in self._waits.values() if wait.due_ns <= turn.now_ns]:
            self._check(wait, turn, is_stopping=is_stopping)
        for local_rank, escalation in self._escalations.items():
            number = escalation.advance(turn.now_s, partial(turn.seen.run_delays_ns.__getitem__, local_rank))
            if number is not None:
                # pending for the main thread when SIGCONT lets it go on
                turn.do(SignalRanks((local_rank,), number))
        if self._hooks_due_ns is not None and turn.now_ns >= self._hooks_due_ns:
            self._hooks_due_ns = None
            self._say_unwatched(turn)

    def _say_unwatched(self, turn: Turn) -> None:
        """Say which configured timeouts protect nothing, because no hook tells that they run."""
        cycle = self._cycle
        if idle := cycle.running - cycle.hooked:
            has = "has" if len(idle) == 1 else "have"
            turn.say_for_all(
                f"timeouts are configured, but {self._named(idle)} {has} not called setup or init_workload_monitoring: "
                "hangs there are not detected"
            )
        boards = {local_rank: turn.seen.boards[local_rank] for local_rank in cycle.running & cycle.hooked}
        silent = [
            local_rank
            for local_rank, board in boards.items()
            if board is not None and not board.heartbeats and any(section.open_count for section in board.sections)
        ]
        if silent and any(self._configured.get(name) for name in HEARTBEATS):
            s = "s" if len(silent) == 1 else ""
            turn.say_for_all(
                f"heartbeat timeouts are configured, but {self._named(silent)} open{s} sections and send{s} no "
                "heartbeat: they do not apply"
            )

    def _named(self, local_ranks: Collection[int]) -> str:
        ranks = spans(sorted(self._cycle.ranks[each] for each in local_ranks))
        return f"rank{'s' if len(local_ranks) > 1 else ''} {', '.join(ranks)}"

    # -- ranks that are late --------------------------------------------------------------------------------------

    def _wait(self, kind: str, local_rank: int, since_ns: int, timeout_s: float | None, turn: Turn) -> None:
        if timeout_s is None or local_rank not in self._cycle.started:
            return
        due_ns = max(turn.now_ns, since_ns + round(timeout_s * 1e9))
        wait = self._waits[local_rank] = _Wait(
            kind=kind, local_rank=local_rank, since_ns=since_ns, timeout_s=timeout_s, asked_ns=since_ns, due_ns=due_ns
        )
        if self._stopped_ns > since_ns:  # the wait began before a stop of the node, and its event came after that
            self._excuse(wait, self._stopped_ns)

    def _check(self, wait: _Wait, turn: Turn, *, is_stopping: bool) -> None:
        now_ns = turn.now_ns
        if self._pauses.since_ns is not None:
            wait.asked_ns, wait.due_ns = now_ns, now_ns + _PAUSED_NS
            return
        if now_ns - wait.due_ns > LATE_NS:
            self._excuse(wait, now_ns)
        elapsed_ns = now_ns - wait.since_ns - self._pauses.within(wait.since_ns, now_ns) - wait.excused_ns
        left_ns = round(wait.timeout_s * 1e9) - elapsed_ns
        if left_ns > 0:
            wait.asked_ns, wait.due_ns = now_ns, now_ns + left_ns
            return
        del self._waits[wait.local_rank]
        if wait.kind == "exit" or not is_stopping:
            self._report_late(wait, elapsed_ns / 1e9, turn)

    def _excuse(self, wait: _Wait, now_ns: int) -> None:
        """Exclude the time since the last check, in which the node may have been stopped. Pauses never count."""
        wait.excused_ns += now_ns - wait.asked_ns - self._pauses.within(wait.asked_ns, now_ns)
        wait.asked_ns = now_ns

    def _report_late(self, wait: _Wait, elapsed_s: float, turn: Turn) -> None:
        cycle, local_rank = self._cycle, wait.local_rank
        board = turn.seen.boards[local_rank]
        verdict = cycle.verdict(
            local_rank,
            wait.kind,
            turn,
            elapsed_s=elapsed_s,
            timeout_s=wait.timeout_s,
            since_ns=wait.since_ns,
            pid=cycle.started[local_rank].pid,
            iteration=None if board is None else board.iteration,
            state="T" if turn.seen.stopped[local_rank] else None,
            observed_only=self._options.given.observe_only,
        )
        turn.do(Write(replace(verdict, text=describe_hang(verdict))))
        if verdict.observed_only:
            turn.say(f"{describe_hang_and_iteration(verdict)}: not killed (observe-only)")
            return
        if wait.kind == "exit" and cycle.only_exits_are_missing(turn.seen):
            cycle.finished_late.add(local_rank)
            turn.say(
                f"{describe_hang(verdict)}: terminating it and treating it as finished, "
                "because the other ranks of this node have finished"
            )
        else:
            cycle.found_hung(verdict, turn, by_monitor=False)
            others = [each.local_rank for each in self._waits.values() if each.kind == wait.kind]
            if others and cycle.suspects is None:
                # ranks that are late may wait for each other: suspect all, or the only one that is stopped
                suspects = [local_rank, *others]
                stopped = [each for each in suspects if turn.seen.stopped[each]]
                cycle.suspects = verdict, stopped if len(stopped) == 1 else suspects
                # a rank that may go on gets no signal
                self._collect(others, turn, passive=self._options.min_healthy)
        self._end(local_rank, turn, evidence=True)

    def end_missing(self, review: Reviewed, turn: Turn, suspects: Collection[int] = ()) -> None:
        """Terminate a rank of this node that keeps the others waiting; these go on. ``suspects``: ranks that their
        monitors terminate, if they hang."""
        cycle, rank, found = self._cycle, review.rank, review.verdict
        if rank is None or rank not in cycle.ranks:
            return
        local_rank = cycle.ranks.index(rank)
        place = review.text.removeprefix(f"rank {rank} ")
        cycle.places[local_rank] = place.partition(") ")[2] if review.decides and place[:1] == "(" else place
        is_missing = local_rank in cycle.running or not review.decides  # one that has exited is missing for good
        if is_missing and local_rank not in {*suspects, *cycle.hung}:
            facts = {name: getattr(found, name) for name in ("elapsed_s", "timeout_s", "section", "iteration")}
            cycle.found_hung(cycle.verdict(local_rank, found.kind, turn, **facts), turn, by_monitor=False)
            self._end(local_rank, turn)

    def _end(self, local_rank: int, turn: Turn, *, evidence: bool = False) -> None:
        """Terminate a rank as its monitor would: only the process itself, with SIGKILL after a grace. ``evidence`` is
        collected first, if it has a monitor."""
        is_collected = evidence and self._collect([local_rank], turn)
        due_s = turn.now_s + (EVIDENCE_S if is_collected else 0.0)
        self._escalations[local_rank] = Escalation(self._options.given.rank_termination_signal, due_s=due_s)

    def _collect(self, local_ranks: Collection[int], turn: Turn, *, passive: bool = False) -> bool:
        """Have evidence collected on ranks that have a monitor. Return False if none has."""
        asked = self._cycle.watched.intersection(local_ranks)
        until_ns = turn.now_ns + round(EVIDENCE_S * 1e9)
        turn.order(asked, Collect(self._cycle.cycle, until_ns, passive=passive))
        return bool(asked)
