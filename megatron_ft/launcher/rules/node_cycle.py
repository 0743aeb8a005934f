"""One cycle on this node: the facts on its ranks, collected event by event, and the cause found in them. Pure."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import describe_hang, find_cause, hang_cause, undetermined_hang
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.exits import describe_exit, failure_signature, has_own_error, is_by_us, was_ending
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.diagnosis.root_cause import find
from megatron_ft.job.rules.decisions import Decision
from megatron_ft.job.rules.restart_policy import NodeState, Reached
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.events import KeepEvidence, Readings, Write
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.link.base import layout
from megatron_ft.link.base.control import WorkloadControl
from megatron_ft.link.base.escalation import GRACE_S, Grace
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.rerun import rerun_meaning
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited, RankStarted, TrainingAgain
from megatron_ft.link.facts.monitor import Attached, FirstStep, Signalled
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import Observation, RankReport

_HUNG_AND_ALIVE_S = GRACE_S + 15.0
"""Time from a verdict after which its rank should be gone: the monitor signals, and kills after the grace."""
_ENDS_TOGETHER_NS = 10_000_000_000
"""Time from a crash after the end of a rank's run until the other ranks of the node must have ended theirs."""
_COUNTED_LATE_NS = 3_000_000_000
"""Longest delay from a collective's completion to its note on the board: its thread may get no processor."""
_READABLE_NS, _READ_AGAIN_NS = 5_000_000_000, 200_000_000
"""Time from an exit for which a node's report waits for the rank's error file, and time between two attempts."""


class NodeCycle:
    """One cycle on this node; by local rank, if nothing else is said. ``ranks`` are global ones, none before the nodes
    have met.

    ``parts`` are told of ranks that fail.
    """

    def __init__(self, decision: Decision | None, parts: Sequence[LauncherPart], *, now_ns: int) -> None:
        self.decision = decision
        self.cycle = -1 if decision is None else decision.cycle
        self.ranks: Sequence[int] = ()
        self.place, self.nodes, self.world_size = 0, 0, 1
        self.begun_ns = self.met_ns = now_ns
        """When the cycle began here, and when the nodes had met."""
        self.started: dict[int, RankStarted] = {}
        self.exits: dict[int, RankExited] = {}
        self.watched: set[int] = set()
        """Ranks connected to their monitors, which can collect evidence on them."""
        self.hooked: set[int] = set()
        """Watched ranks whose scripts call hooks, so that their monitors detect hangs."""
        self.hung: dict[int, Grace] = {}
        """Ranks found hung (failed, however they end), and when they should be gone."""
        self.overdue: dict[int, RankHung] = {}
        """Verdicts of monitors on their ranks, whichever rank is the cause."""
        self.shutdown_request: WorkloadControl | None = None
        self.exclude_request: WorkloadControl | None = None
        """First request of a rank for the end of the job, and for this node to be left out."""
        self.mixed: Cause | None = None
        """First rank that has another state than the others of the job; None if none has."""
        self.is_cut_short: bool | None = None
        """True if a rank crashed after the end of its run, and others went on with theirs; None while unknown."""
        self._parts = parts
        self.suspects: tuple[RankHung, Sequence[int]] | None = None
        """First hang found by the launcher itself, with the local ranks of which one hangs, if there are several."""
        self.undecided = "root cause undetermined"
        self.places: dict[int, str] = {}
        """Places, in words, of ranks that others wait for by the evidence on all ranks of the job."""
        self._notes: dict[int, RankSnapshot] = {}
        """Evidence on ranks of a cycle that may hang."""
        self.signalled: dict[int, set[int]] = defaultdict(set)
        """Signals sent by monitors."""
        self.finished_late: set[int] = set()
        """Finished ranks that had to be made to exit; however such a rank ends now, it ends well."""
        self._attached: dict[int, Attached] = {}
        self._first_steps: dict[int, tuple[int, int]] = {}
        """Begin and end of the first step of each rank."""
        self._verdicts: list[RankHung] = []
        self._raised: set[int] = set()
        """Ranks that were ending of an exception of their own when the first hang was reported: no hang."""
        self._unread: set[int] = set()
        """Ranks that have exited, and whose error files can't be read yet."""

    # -- events ------------------------------------------------------------------------------------------------

    def met(self, event: events.RanksMet, now_ns: int) -> None:
        """Note the numbers of the ranks: the nodes have met."""
        self.ranks, self.met_ns = event.ranks, now_ns
        self.place, self.nodes, self.world_size = event.group_rank, event.nodes, event.world_size

    def exited(self, event: RankExited, turn: Turn, *, waits: bool = True) -> None:
        """Log the exit of a rank, with evidence on a failure; once its error file can be read, if it ``waits``."""
        local_rank, seen = event.local_rank, turn.seen
        board = seen.boards[local_rank]
        if board is not None and board.first_step_at_ns:  # its monitor may not have read the board since
            self._first_steps.setdefault(local_rank, (board.first_iteration_at_ns, board.first_step_at_ns))
        signals = {*event.signals_sent, *self.signalled[local_rank]}
        if local_rank in self.hung and event.exitcode < 0:
            # the monitor signals right after its verdict; its report may arrive after the rank's exit
            signals |= {-event.exitcode}
        by_us = is_by_us(event.exitcode, signals)
        end = self._with_last_words(replace(event, signals_sent=tuple(sorted(signals)), by_us=by_us), seen)
        self.exits[local_rank] = end
        if waits and end.unread and turn.now_ns < end.at_ns + _READABLE_NS:
            self._unread.add(local_rank)
            return
        self._unread.discard(local_rank)
        turn.do(Write(end, at_ns=end.at_ns))
        # otherwise it may be the cause, though it was signalled
        ended_by_itself = not by_us or was_ending(end)
        if end.exitcode and ended_by_itself and local_rank not in self.hung:
            turn.do(KeepEvidence(end))
            if end.after_run:
                turn.say(describe_exit(end))
                return
            for part in self._parts:
                part.exited(end, turn)

    def hear_monitor(self, local_rank: int, report: RankReport, turn: Turn) -> None:
        """Take the report of a monitor; it may be about an earlier cycle."""
        if isinstance(report, Signalled):
            number = signal.Signals.__members__.get(report.signal, signal.SIGCONT)
            if local_rank in self.running and number != signal.SIGCONT:
                self.signalled[local_rank].add(number)
        elif not self.has(local_rank, report.cycle):
            return
        elif isinstance(report, Attached):  # a script may reconnect after it has shut its monitoring down
            self.watched.add(local_rank)
            if not report.watch_only:
                self.hooked.add(local_rank)
                if report.at_ns is not None:
                    self._attached.setdefault(local_rank, report)
        elif isinstance(report, FirstStep):
            self._first_steps[local_rank] = report.began_ns or 0, report.at_ns
        elif isinstance(report, Observation) and (local_rank in self.hung or self.suspects is not None):
            self._notes.setdefault(local_rank, self.own_note(local_rank, report.note))

    def verdict(
        self, local_rank: int, kind: str, turn: Turn, *, elapsed_s: float = 0.0, timeout_s: float = 0.0, **more: Any
    ) -> RankHung:
        """Return a verdict of the launcher itself; ``more``: other fields."""
        return RankHung(
            rank=self.ranks[local_rank],
            cycle=self.cycle,
            local_rank=local_rank,
            kind=kind,
            since_ns=more.pop("since_ns", max(0, turn.now_ns - round(elapsed_s * 1e9))),
            elapsed_s=elapsed_s,
            timeout_s=timeout_s,
            at_ns=turn.now_ns,
            **more,
        )

    def found_hung(self, verdict: RankHung, turn: Turn, *, by_monitor: bool) -> None:
        """Note that a rank was found hung: by its monitor, which doesn't see if it waits for another, or by us."""
        local_rank = verdict.local_rank
        if by_monitor and local_rank in self.hung:
            return
        if not self._verdicts:
            ending = ((each, self.end_of_its_exception(each, turn.seen)) for each in self.running)
            self._raised |= {each for each, end in ending if end is not None and has_own_error(end)}
        if local_rank not in self.hung:
            self.hung[local_rank] = Grace(turn.now_s + _HUNG_AND_ALIVE_S, turn.seen.run_delays_ns[local_rank])
        verdict = replace(verdict, rank=self.ranks[local_rank])
        self._verdicts.append(verdict)
        if by_monitor:
            self.overdue[local_rank] = verdict

    def fail_mixed(self, rank: int, text: str) -> None:
        """Note that a rank has another state than the others. Its exit, if it has one, only follows from that."""
        self.mixed = self.mixed or Cause(kind=CauseKind.CRASH, text=text, rank=rank)

    # -- what is due -------------------------------------------------------------------------------------------

    def alarm_ns(self, now_ns: int) -> int | None:
        """Return the latest time of the next ``tick`` and ``state``."""
        dues = [round(grace.due_s * 1e9) for each, grace in self.hung.items() if each not in self.exits]
        read_ns = now_ns + _READ_AGAIN_NS if self._unread else None
        return earliest(*(due_ns for due_ns in dues if due_ns > now_ns), read_ns, self._cut_short_due_ns)

    def tick(self, turn: Turn) -> None:
        """Read error files again, and decide whether ranks that crashed after the end of their runs have failed."""
        self.read_late_words(turn)
        due_ns = self._cut_short_due_ns
        if due_ns is not None and turn.now_ns >= due_ns:
            boards = [turn.seen.boards[local_rank] for local_rank in self.running]
            self.is_cut_short = not all(board is not None and board.closing for board in boards)

    def read_late_words(self, turn: Turn, *, waits: bool = True) -> None:
        """Read the error files again that could not be read."""
        for local_rank in sorted(self._unread):
            self.exited(self.exits[local_rank], turn, waits=waits)

    @property
    def _cut_short_due_ns(self) -> int | None:
        """Time at which the other ranks of this node must have ended their runs; None if none has crashed after its
        own, or the others have."""
        crashes = [end.at_ns for end in self.exits.values() if end.after_run]
        return min(crashes) + _ENDS_TOGETHER_NS if crashes and self.is_cut_short is None else None

    # -- how its ranks are --------------------------------------------------------------------------------------

    def has(self, local_rank: int, cycle: int) -> bool:
        """Return True if that is a rank of this cycle on this node."""
        return cycle == self.cycle and local_rank < len(self.ranks)

    def own_note(self, local_rank: int, note: RankSnapshot) -> RankSnapshot:
        """Return a snapshot with the rank's number: a restart within the process may have changed the one it gives
        itself."""
        return replace(note, rank=self.ranks[local_rank], local_rank=local_rank)

    @property
    def is_started(self) -> bool:
        """True once all ranks were created."""
        return bool(self.ranks) and len(self.started) == len(self.ranks)

    @property
    def running(self) -> set[int]:
        """Started ranks that haven't ended."""
        return self.started.keys() - self.exits.keys()

    @property
    def observed(self) -> set[int]:
        """Running ranks that are watched by their monitors."""
        return self.running & self.watched

    @property
    def spawned_ns(self) -> int | None:
        """Time at which the last rank was created."""
        return max((each.at_ns for each in self.started.values()), default=None)

    def state(self, turn: Turn) -> NodeState:
        """Return the state of this node to report to the coordinator now."""
        if not self.ranks or self._unread:
            return NodeState.HEALTHY
        if self.mixed is not None or self.failed:
            return NodeState.UNHEALTHY
        # a hung rank that its monitor couldn't terminate counts as failed once its grace is over, which is extended by
        # its threads' waits for a CPU
        late = [each for each, grace in self.hung.items() if each not in self.exits and turn.now_s >= grace.due_s]
        over = [each for each in late if self.hung[each].check(turn.now_s, turn.seen.run_delays_ns[each])]
        if over:
            return NodeState.UNHEALTHY
        return NodeState.SUCCEEDED if self.all_have_ended else NodeState.HEALTHY

    @property
    def failed(self) -> list[RankExited]:
        """Exits of failed ranks."""
        return [end for end in self.exits.values() if self._has_failed(end)]

    def _has_failed(self, end: RankExited) -> bool:
        if end.local_rank in self.finished_late:
            return False
        is_failure = end.exitcode != 0 and (not end.after_run or bool(self.is_cut_short))
        return is_failure or end.local_rank in self.hung

    @property
    def all_have_ended(self) -> bool:
        """True once all ranks have ended, in whatever way."""
        return len(self.exits) == len(self.ranks)

    def failures(self) -> list[str]:
        """Return the exits of failed ranks in words, first that of a rank that others waited for."""
        notes = [note for note in self._notes.values() if note.local_rank in self.hung]
        elapsed_s = max((note.open_s for note in notes), default=0.0)
        first = find(notes, elapsed_s=elapsed_s, are_all=len(notes) == len(self.ranks)).rank if notes else None
        return [self._failure(end) for end in sorted(self.failed, key=lambda end: end.rank != first)]

    def _failure(self, end: RankExited) -> str:
        found = next((each for each in [*self.overdue.values(), *self._verdicts] if each.rank == end.rank), None)
        if found is None or (end.exitcode and not end.by_us):
            return describe_exit(end)
        note = self._notes.get(end.local_rank)
        where = self._place(end.local_rank) if note is None else place(note)
        return f"{describe_hang(found)}, {where}" if where else describe_hang(found)

    def only_exits_are_missing(self, seen: Readings) -> bool:
        """Return True if ranks have exited with 0, none has failed, and all others have shut their monitoring down."""
        if not self.exits or self.failed or not self.hung.keys() <= self.exits.keys():
            return False
        boards = [seen.boards[local_rank] for local_rank in range(len(self.ranks)) if local_rank not in self.exits]
        return all(board is not None and board.closing for board in boards)

    # -- how far they got ---------------------------------------------------------------------------------------

    def phases_ns(self) -> dict[str, int] | None:
        """Return the end of each phase of the start (monotonic ns); None until all ranks here are through a step."""
        if not self.ranks or len(self._first_steps) < len(self.ranks):  # none: the nodes are still meeting
            return None
        moments = {"rendezvous": self.met_ns, "ranks created": self.spawned_ns or self.met_ns}
        began = [each.user_code_ns for each in self._attached.values() if each.user_code_ns is not None]
        if began:
            moments["user code"] = max(began)
        if len(self._attached) == len(self.ranks):
            # the first known moment of a script; earlier phases can't be separated
            has_group = any(each.has_group for each in self._attached.values())
            name = "imports and process group" if has_group else "imports"
            moments[name] = max(each.at_ns or 0 for each in self._attached.values())
        began_ns, ended_ns = zip(*self._first_steps.values(), strict=True)
        if all(began_ns):
            moments["set up"] = max(began_ns)
        return {**moments, "first step": max(ended_ns)}

    def noticed_ns(self) -> int | None:
        """Return when the failure of this cycle was first known; None if no rank of this node has failed."""
        return min([*(end.at_ns for end in self.failed), *(each.at_ns for each in self._verdicts)], default=None)

    def last_iteration(self, seen: Readings) -> int | None:
        """Return the furthest iteration that a rank of this node reported."""
        return max((b.iteration for b in self._boards(seen) if b.iteration is not None), default=None)

    def reached(self, seen: Readings, cause: Cause | None = None) -> Reached | None:
        """Return how far all ranks of this node got that reported an iteration; None if iterations are no measure.

        ``cause``: why the cycle failed, if a rank did.
        """
        # the one that is behind: others may have gone on for a moment after a rank had failed
        boards = [*self._boards(seen)]
        saved = any(board.saves for board in boards)
        if not saved and any(board.iterations_back for board in boards):
            return None  # the number of a batch in an epoch, for example, is no measure of the job's progress
        known = [(b.first_iteration, b.iteration) for b in boards if b.first_iteration is not None]
        checkpointed = None if known else seen.checkpointed()
        if checkpointed is not None:
            return Reached(first=checkpointed, last=checkpointed)
        first = min((first for first, _ in known), default=-1)
        last = min((-1 if last is None else last for _, last in known), default=-1)
        trained = bool(known) or any(layout.is_through_its_start(board) for board in boards)
        signature = ""
        is_crash = cause is not None and cause.kind is CauseKind.CRASH and not (cause.follows or cause.by_us)
        if not trained and is_crash and cause is not None and cause.rank in self.ranks:
            local_rank = self.ranks.index(cause.rank)
            if end := self.exits.get(local_rank) or self.end_of_its_exception(local_rank, seen):
                lived_s = ((end.raised_at_ns or end.at_ns) - self.started[local_rank].at_ns) / 1e9
                signature = failure_signature(end, is_watched=local_rank in self.hooked, lived_s=lived_s)
        return Reached(first, last, trained, signature, saved)

    def _boards(self, seen: Readings) -> Iterable[BoardSnapshot]:
        return filter(None, (seen.boards[local_rank] for local_rank in range(len(self.ranks))))

    # -- why it failed ------------------------------------------------------------------------------------------

    def cause(self) -> Cause:
        """Return why the cycle failed."""
        if self.mixed is not None:
            return self.mixed
        raised = {self.ranks[local_rank] for local_rank in self._raised}
        cause = find_cause(list(self.exits.values()), [] if raised else self._verdicts, raised=raised)
        if self.suspects is not None and not raised and (cause is None or cause.rank == self.suspects[0].rank):
            verdict, local_ranks = self.suspects
            if len(local_ranks) == 1:  # the only one that is stopped
                rank = self.ranks[local_ranks[0]]
                return hang_cause(replace(verdict, rank=rank, state="T"), self._place(local_ranks[0]))
            places = (f"rank {self.ranks[each]} {self._place(each)}".rstrip() for each in sorted(local_ranks))
            return undetermined_hang(verdict, detail=f"root cause undetermined; candidates: {'; '.join(places)}")
        if cause is None:
            return Cause(kind=CauseKind.CRASH, text="no rank of this node exited, and none could be killed")
        if cause.kind is not CauseKind.HANG:
            return cause
        found = next(each for each in self._verdicts if each.rank == cause.rank)
        is_shown = found.stopped or found.local_rank in self.places
        if found.local_rank in self.overdue and self.world_size > 1 and not is_shown:
            # without evidence on all ranks it may only have waited for another
            return undetermined_hang(found, detail=self.undecided)
        return replace(cause, detail=self._place(found.local_rank))

    def _place(self, local_rank: int) -> str:
        note = self._notes.get(local_rank)
        return self.places.get(local_rank) or (f"in {note.frame}" if note is not None and note.frame else "")

    def own_failure(self, seen: Readings) -> Cause | None:
        """Return the failure of a rank of this node that failed by itself, not only because it had lost another.

        A rank that ends of an exception counts, even before it has ended.
        """
        running = sorted(self.running)
        ending = [self.end_of_its_exception(each, seen) or self._end_by_rerun(each, seen) for each in running]
        own = find_cause([*self.exits.values(), *filter(None, ending)], [*self.overdue.values(), *self._verdicts])
        is_own = own is not None and own.kind is not CauseKind.HANG and not (own.follows or own.by_us)
        return own if is_own else None

    def request_cause(self) -> Cause:
        """Return the request of a rank of this node that ended the cycle, as a cause."""
        request = self.shutdown_request or self.exclude_request
        assert request is not None
        return Cause(kind=CauseKind.REQUEST, text=request.text, rank=request.rank)

    def end_of_its_exception(self, local_rank: int, seen: Readings) -> RankExited | None:
        """Return the expected exit of a rank that has raised and not gone on; None for other ranks."""
        words = seen.words[local_rank]
        if not words.error or _has_gone_on(words, seen.boards[local_rank]):
            return None
        return self._expected_exit(local_rank, seen, exitcode=1, at_ns=words.raised_at_ns)

    def _end_by_rerun(self, local_rank: int, seen: Readings) -> RankExited | None:
        """Return the expected exit of a rank that Megatron's rerun state machine ends, as it did another one here.

        None for other ranks.
        """
        other = next((each for each in self.exits.values() if each.rerun is not None), None)
        state = None if other is None else seen.words[local_rank].rerun
        if other is None or state is None or rerun_meaning(other.exitcode, state) is not other.rerun:
            return None
        return self._expected_exit(local_rank, seen, exitcode=other.exitcode, at_ns=other.at_ns)

    def _expected_exit(self, local_rank: int, seen: Readings, *, exitcode: int, at_ns: int) -> RankExited:
        end = RankExited(
            rank=self.ranks[local_rank],
            cycle=self.cycle,
            local_rank=local_rank,
            pid=self.started[local_rank].pid,
            exitcode=exitcode,
            at_ns=at_ns,
        )
        return self._with_last_words(end, seen)

    def _with_last_words(self, end: RankExited, seen: Readings) -> RankExited:
        """Add what the rank's board and its last output say."""
        words, board = seen.words[end.local_rank], seen.boards[end.local_rank]
        if end.exitcode < 0 and words.raised_at_ns and _has_gone_on(words, board):
            words = CrashOutput(where=words.crashed_at)  # an old exception isn't what ended it
        # a crash after the rank had ended its monitoring and its script: its work was done
        after_run = bool(board and board.closing and end.exitcode and not (end.by_us or words.error or words.unread))
        # sys.exit(1) lets all exit handlers run, os._exit(1) in one of them doesn't
        is_in_a_handler = words.exiting and (end.exitcode < 0 or not words.exited)
        after_run = after_run and (is_in_a_handler or seen.is_finished())
        return replace(
            end,
            iteration=None if board is None else board.iteration,
            error=words.error or (words.terminated_by if end.exitcode == -signal.SIGABRT else "") or None,
            raised_at_ns=min(words.raised_at_ns, end.at_ns or words.raised_at_ns),
            where=words.where,
            rerun_state=words.rerun,
            unread=words.unread and end.exitcode > 0,
            after_run=after_run,
        )


def _has_gone_on(words: CrashOutput, board: BoardSnapshot | None) -> bool:
    """Return True if a rank has reported progress since its exception. A board that was never read tells nothing."""
    if board is None:
        return False
    counted = board.collectives
    collectives_ns = 0 if counted is None else counted.moved_ns - _COUNTED_LATE_NS
    return words.raised_at_ns <= max(board.last_transition_ns, board.last_heartbeat_ns, collectives_ns)


class Downtime:
    """Time from a cycle's failure to the next one's first steps; the failed ranks are gone now."""

    def __init__(self, failed: NodeCycle, turn: Turn) -> None:
        noticed_ns = failed.noticed_ns()
        self._noticed_ns = turn.now_ns if noticed_ns is None else noticed_ns
        self._stopped_ns = turn.now_ns
        self._reached = _iterations(failed, turn)

    def report_end(self, cycle: NodeCycle, turn: Turn) -> bool:
        """Log the phases of the start once all ranks here have completed their first step. Return True then."""
        phases = cycle.phases_ns()
        if phases is None or cycle.met_ns < self._stopped_ns:
            return False  # not yet; or late events of the failed cycle
        moments = {"stop": self._stopped_ns, **phases}
        spans = itertools.pairwise([self._noticed_ns, *moments.values()])
        seconds = {name: (b - a) / 1e9 for name, (a, b) in zip(moments, spans, strict=True)}
        parts = ", ".join(f"{name} {duration:.2f}" for name, duration in seconds.items())
        total_s = sum(seconds.values())
        turn.say_for_all(
            f"cycle {cycle.cycle} is training again {total_s:.2f} s after the failure was detected ({parts})"
        )
        before, now = self._reached, _iterations(cycle, turn)
        redone = None if before is None or now is None else max(0, before.last - now.first)
        turn.do(Write(TrainingAgain(cycle=cycle.cycle, seconds=seconds, redone=redone)))
        return True


def _iterations(cycle: NodeCycle, turn: Turn) -> Reached | None:
    """Return the first and last iteration of the ranks of this node; None if they report none."""
    reached = None if cycle.last_iteration(turn.seen) is None else cycle.reached(turn.seen)
    return None if reached is None or reached.first < 0 else reached
