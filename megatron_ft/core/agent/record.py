"""Facts on the ranks of this node in one cycle, collected event by event, and the cause found in them. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import msgspec

from megatron_ft.core.agent.events import Readings
from megatron_ft.core.board import layout
from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.control import WorkloadAction, WorkloadControl
from megatron_ft.core.escalation import Grace
from megatron_ft.core.facts.launcher import Cause, CauseKind, RankExited, RankStarted, RestoreFailed
from megatron_ft.core.facts.monitor import Attached, FirstStep, Signalled
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.rerun import rerun_meaning
from megatron_ft.diagnosis.cycle_cause import describe_hang, find_cause, hang_of_one, undetermined_hang
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.exits import describe_exit, failure_signature, has_own_error, is_by_us
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.diagnosis.root_cause import find
from megatron_ft.job.rules.restart_policy import Reached
from megatron_ft.memory.rules.lines import restore_failed

_HUNG_AND_ALIVE_S = 20.0
"""Time from a verdict after which its rank should be gone: the monitor signals, and kills after a grace of 5 s."""
_ENDS_TOGETHER_NS = 10_000_000_000
"""Time from a crash after the end of a rank's run until the other ranks of the node must have ended theirs."""
_COUNTED_LATE_NS = 3_000_000_000
"""Longest delay from a collective's completion to its note on the board: its thread may get no processor."""


class CycleRecord:
    """Facts of one cycle, by local rank; ``ranks`` are global ones, none before the nodes have met."""

    def __init__(self, cycle: int, ranks: Sequence[int], *, met_ns: int, world_size: int = 1) -> None:
        self.cycle = cycle
        self.ranks = ranks
        self.met_ns = met_ns
        """Time at which the nodes had met, when a record begins."""
        self.world_size = world_size
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
        self.found: Cause | None = None
        """Rank that hangs, by the evidence on all ranks; None while unknown."""
        self.suspects: tuple[RankHung, Sequence[int]] | None = None
        """First hang found by the launcher itself, with the local ranks of which one hangs, if there are several."""
        self.places: dict[int, str] = {}
        """Places, in words, of ranks that the launcher itself found hung, by global rank."""
        self.unrestored: Cause | None = None
        """First rank that couldn't restore its state."""
        self.hang_notes: dict[int, RankSnapshot] = {}
        """Evidence on ranks found hung, by local rank."""
        self.is_cut_short: bool | None = None
        """True if a rank crashed after the end of its run, and others went on with theirs; None while unknown."""
        self._signalled: dict[int, set[int]] = {}
        """Signals sent by monitors."""
        self._finished_late: set[int] = set()
        self._attached: dict[int, Attached] = {}
        self._first_steps: dict[int, tuple[int, int]] = {}
        """Begin and end of the first step of each rank."""
        self._verdicts: list[RankHung] = []
        self._raised: set[int] = set()
        """Ranks that were ending of an exception of their own when the first hang was reported: no hang."""

    # -- events ------------------------------------------------------------------------------------------------

    def created(self, event: RankStarted) -> None:
        self.started[event.local_rank] = event

    def exited(self, event: RankExited, seen: Readings) -> RankExited:
        """Record a rank's exit, and return it."""
        local_rank, board = event.local_rank, seen.boards[event.local_rank]
        if board is not None and board.first_step_at_ns:  # its monitor may not have read the board since
            step_ns = board.first_iteration_at_ns, board.first_step_at_ns
            self._first_steps.setdefault(local_rank, step_ns)
        signals = {*event.signals_sent, *self._signalled.get(local_rank, ())}
        if local_rank in self.hung and event.exitcode < 0:
            # the monitor signals right after its verdict; its report may arrive after the rank's exit
            signals |= {-event.exitcode}
        by_us = is_by_us(event.exitcode, signals)
        event = msgspec.structs.replace(event, signals_sent=tuple(sorted(signals)), by_us=by_us)
        self.exits[local_rank] = self._with_last_words(event, seen)
        return self.exits[local_rank]

    def signalled(self, local_rank: int, event: Signalled) -> None:
        """Record a monitor's signal to its rank."""
        number = signal.Signals.__members__.get(event.signal, signal.SIGCONT)
        if local_rank in self.started and local_rank not in self.exits and number != signal.SIGCONT:
            self._signalled.setdefault(local_rank, set()).add(number)

    def attached(self, local_rank: int, event: Attached) -> None:
        """Record a rank's connection to its monitor; a script may reconnect after it has shut its monitoring down."""
        self.watched.add(local_rank)
        if event.watch_only:
            return
        self.hooked.add(local_rank)
        if event.at_ns is not None:
            self._attached.setdefault(local_rank, event)

    def trains(self, local_rank: int, event: FirstStep) -> None:
        """Record a rank's first step."""
        self._first_steps[local_rank] = event.began_ns or 0, event.at_ns

    def found_by_monitor(self, verdict: RankHung, now_s: float, seen: Readings) -> None:
        """Record a monitor's verdict: its rank, or one that it waits for, is the cause."""
        if verdict.local_rank not in self.hung:
            self._see_who_raised(seen)
            self._start_grace(verdict.local_rank, now_s, seen)
            verdict = msgspec.structs.replace(verdict, rank=self.ranks[verdict.local_rank])
            self.overdue[verdict.local_rank] = verdict
            self._verdicts.append(verdict)

    def found_by_launcher(self, verdict: RankHung, now_s: float, seen: Readings) -> None:
        """Record a hang found by the launcher itself, where the monitor can't see."""
        self._see_who_raised(seen)
        self._start_grace(verdict.local_rank, now_s, seen)
        self._verdicts.append(verdict)

    def finished_late(self, local_rank: int) -> None:
        """Record that a finished rank had to be made to exit; however it ends now, it ends well."""
        self._finished_late.add(local_rank)

    def requested(self, request: WorkloadControl) -> None:
        """Record a rank's request for the end of the job, or for this node to be left out; the first of each counts."""
        if request.action == WorkloadAction.ShutdownWorkload.name:
            self.shutdown_request = self.shutdown_request or request
        else:
            self.exclude_request = self.exclude_request or request

    def not_restored(self, failed: RestoreFailed) -> None:
        """Record that a rank couldn't restore its state. Its exit, if it has one, only follows from that."""
        text = restore_failed(failed.rank, failed.key.iteration, failed.text)
        self.unrestored = self.unrestored or Cause(kind=CauseKind.CRASH, text=text, rank=failed.rank)

    def blame(self, cause: Cause | None) -> None:
        """Record the cause found by comparing the evidence on all ranks; None if undetermined."""
        self.found = cause

    def suspect(self, verdict: RankHung, local_ranks: Sequence[int]) -> None:
        """Record a hang found by the launcher itself, of which one of these ranks is the cause."""
        self.suspects = verdict, local_ranks

    def locate(self, rank: int, where: str) -> None:
        """Record the place, in words, of a (global) rank that the launcher itself found hung."""
        self.places[rank] = where

    def _see_who_raised(self, seen: Readings) -> None:
        if not self._verdicts:
            ending = ((local_rank, self.end_of_its_exception(local_rank, seen)) for local_rank in self.running)
            self._raised |= {local_rank for local_rank, end in ending if end is not None and has_own_error(end)}

    def _start_grace(self, local_rank: int, now_s: float, seen: Readings) -> None:
        if local_rank not in self.hung:
            self.hung[local_rank] = Grace(now_s + _HUNG_AND_ALIVE_S, seen.run_delays_ns[local_rank])

    # -- how its ranks are --------------------------------------------------------------------------------------

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

    def is_killed(self, local_rank: int) -> bool:
        """Return True if the rank's monitor has sent it SIGKILL."""
        return signal.SIGKILL in self._signalled.get(local_rank, ())

    def has_failed(self, local_rank: int) -> bool:
        """Return True if the rank has failed."""
        rank_exit = self.exits.get(local_rank)
        if rank_exit is None or local_rank in self._finished_late:
            return False
        is_failure = rank_exit.exitcode != 0 and (not rank_exit.after_run or bool(self.is_cut_short))
        return is_failure or local_rank in self.hung

    @property
    def cut_short_due_ns(self) -> int | None:
        """Time at which the other ranks of this node must have ended their runs; None if none has crashed after its
        own, or the others have."""
        crashes = [rank_exit.at_ns for rank_exit in self.exits.values() if rank_exit.after_run]
        return min(crashes) + _ENDS_TOGETHER_NS if crashes and self.is_cut_short is None else None

    def check_cut_short(self, now_ns: int, seen: Readings) -> None:
        """Decide whether ranks that crashed after the end of their runs have failed."""
        due_ns = self.cut_short_due_ns
        if due_ns is not None and now_ns >= due_ns:
            boards = [seen.boards[local_rank] for local_rank in self.running]
            self.is_cut_short = not all(board is not None and board.closing for board in boards)

    @property
    def failed(self) -> list[RankExited]:
        """Exits of failed ranks."""
        return [rank_exit for local_rank, rank_exit in self.exits.items() if self.has_failed(local_rank)]

    @property
    def all_have_ended(self) -> bool:
        """True once all ranks have ended, in whatever way."""
        return len(self.exits) == len(self.ranks)

    def failures(self) -> list[str]:
        """Return the exits of failed ranks in words, first that of a rank that others waited for."""
        notes = [note for note in self.hang_notes.values() if note.local_rank in self.hung]
        elapsed_s = max((note.open_s for note in notes), default=0.0)
        first = find(notes, elapsed_s=elapsed_s, are_all=len(notes) == len(self.ranks)).rank if notes else None
        return [self._failure(rank_exit) for rank_exit in sorted(self.failed, key=lambda end: end.rank != first)]

    def _failure(self, rank_exit: RankExited) -> str:
        verdicts = [*self.overdue.values(), *self._verdicts]
        found = next((verdict for verdict in verdicts if verdict.rank == rank_exit.rank), None)
        if found is None or (rank_exit.exitcode and not rank_exit.by_us):
            return describe_exit(rank_exit)
        note = self.hang_notes.get(rank_exit.local_rank)
        where = self.places.get(rank_exit.rank, "") if note is None else place(note)
        return f"{describe_hang(found)}, {where}" if where else describe_hang(found)

    def only_exits_are_missing(self, seen: Readings) -> bool:
        """Return True if ranks have exited with 0, none has failed, and all others have shut their monitoring down."""
        if not self.exits or self.failed or not self.hung.keys() <= self.exits.keys():
            return False
        boards = [seen.boards[local_rank] for local_rank in range(len(self.ranks)) if local_rank not in self.exits]
        return all(board is not None and board.closing for board in boards)

    def check_graces(self, now_s: float, seen: Readings) -> bool:
        """Extend graces that are over by threads' CPU waits. Return True if one is over even so."""
        late = {lr for lr, grace in self.hung.items() if now_s >= grace.due_s} - self.exits.keys()
        return any(self.hung[local_rank].check(now_s, seen.run_delays_ns[local_rank]) for local_rank in late)

    def grace_due_s(self, now_s: float) -> float | None:
        """Return the time of the next ``check_graces``; None if no hung rank is left."""
        dues = (grace.due_s for local_rank, grace in self.hung.items() if local_rank not in self.exits)
        return min((due_s for due_s in dues if due_s > now_s), default=None)

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
        exits = [rank_exit.at_ns for rank_exit in self.failed]
        return min([*exits, *(verdict.at_ns for verdict in self._verdicts)], default=None)

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
        if self.unrestored is not None:
            return self.unrestored
        if self.found is not None:
            return self.found
        raised = {self.ranks[local_rank] for local_rank in self._raised}
        cause = find_cause(list(self.exits.values()), [] if raised else self._verdicts, raised=raised)
        if self.suspects is not None and not raised and (cause is None or cause.rank == self.suspects[0].rank):
            verdict, local_ranks = self.suspects
            ranks = sorted(self.ranks[local_rank] for local_rank in local_ranks)
            return hang_of_one(verdict, {rank: self.places.get(rank, "") for rank in ranks})
        if cause is not None and cause.kind is CauseKind.HANG and cause.rank in self.places:
            return msgspec.structs.replace(cause, detail=self.places[cause.rank])
        found = next((each for each in self.overdue.values() if cause is not None and each.rank == cause.rank), None)
        if cause is not None and cause.kind is CauseKind.HANG and found is not None and self.world_size > 1:
            # without evidence on all ranks it may only have waited for another
            return cause if found.stopped else undetermined_hang(found, detail="root cause undetermined")
        return cause or Cause(kind=CauseKind.CRASH, text="no rank of this node exited, and none could be killed")

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
        others = [each for each in self.exits.values() if each.rerun is not None]
        state = seen.words[local_rank].rerun if others else None
        if state is None or rerun_meaning(others[0].exitcode, state) is not others[0].rerun:
            return None
        return self._expected_exit(local_rank, seen, exitcode=others[0].exitcode, at_ns=others[0].at_ns)

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
        return msgspec.structs.replace(
            end,
            iteration=None if board is None else board.iteration,
            error=words.error or (words.terminated_by if end.exitcode == -signal.SIGABRT else "") or None,
            raised_at_ns=min(words.raised_at_ns, end.at_ns or words.raised_at_ns),
            where=words.where,
            rerun_state=words.rerun,
            unread=words.unread and end.exitcode > 0,
            after_run=_ended_after_run(end, words, board, seen),
        )


def _ended_after_run(end: RankExited, words: CrashOutput, board: BoardSnapshot | None, seen: Readings) -> bool:
    """Return True for a crash after the rank had ended its monitoring and its script: its work was done.

    ``sys.exit(1)`` lets all exit handlers run, ``os._exit(1)`` in one of them doesn't.
    """
    if end.exitcode == 0 or end.by_us or words.error or words.unread or board is None or not board.closing:
        return False
    return (words.exiting and (end.exitcode < 0 or not words.exited)) or seen.is_finished()


def _has_gone_on(words: CrashOutput, board: BoardSnapshot | None) -> bool:
    """Return True if a rank has reported progress since its exception. A board that was never read tells nothing."""
    if board is None:
        return False
    counted = board.collectives
    collectives_ns = 0 if counted is None else counted.moved_ns - _COUNTED_LATE_NS
    return words.raised_at_ns <= max(board.last_transition_ns, board.last_heartbeat_ns, collectives_ns)
