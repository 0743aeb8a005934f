"""One cycle on this node: reports of its ranks and their monitors, and the immediate reactions. Pure."""

from __future__ import annotations

import itertools

import msgspec

from megatron_ft.core.agent import cycle_lines, events
from megatron_ft.core.agent.deadlines import Deadlines
from megatron_ft.core.agent.effects import KeepEvidence, Write
from megatron_ft.core.agent.hang import NodeHangDiagnosis
from megatron_ft.core.agent.last_look import LastLook
from megatron_ft.core.agent.node_collective_watch import NodeCollectiveWatch
from megatron_ft.core.agent.node_waits import NodeWaits
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Options, Turn
from megatron_ft.core.facts.launcher import RankExited, RankStarted, RestoreFailed, TrainingAgain
from megatron_ft.core.facts.monitor import Attached, Detached, FirstStep, Signalled
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.messages.monitor_messages import Observation, RankReport, Suspect
from megatron_ft.core.pauses import Pauses
from megatron_ft.core.times import earliest
from megatron_ft.diagnosis.exits import describe_exit, is_secondary_failure, was_ending
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, Reviewed
from megatron_ft.diagnosis.waits import Lags
from megatron_ft.job.rules.restart_policy import NodeState, Reached
from megatron_ft.learning.launcher_part import LauncherLearning

_READABLE_NS, _READ_AGAIN_NS = 5_000_000_000, 200_000_000
"""Time from an exit for which a node's report waits for the rank's error file, and time between two attempts."""


class NodeCycle:
    """One cycle on this node. ``met`` is None before the nodes have met."""

    def __init__(
        self, options: Options, number: int, met: events.RanksMet | None, learning: LauncherLearning, *, now_ns: int
    ) -> None:
        self.met = met
        ranks, world_size = ((), 1) if met is None else (met.ranks, met.world_size)
        self.record = CycleRecord(number, ranks, met_ns=now_ns, world_size=world_size)
        self.diagnosis = NodeHangDiagnosis(options, self.record, learning)
        self.last_look = LastLook(options, self.record)
        self._options = options
        self._deadlines: Deadlines | None = None
        self._collectives: NodeCollectiveWatch | None = None
        self.waits: NodeWaits | None = None
        self._parts: list[Deadlines | NodeCollectiveWatch | NodeWaits] = []
        """Watches in use, from the start of the ranks."""
        self._unread: set[int] = set()
        """Ranks that have exited, and whose error files can't be read yet."""
        self._reported: set[tuple[str, int | None]] = set()
        """Intervals (what is timed, and the iteration) whose hang was reported to the coordinator, without consequence.
        """

    def started(self, pauses: Pauses, turn: Turn) -> None:
        """Watch deadlines and collectives from now on: all ranks were created."""
        self._deadlines = Deadlines(self._options, self.record, pauses, turn)
        self._collectives = NodeCollectiveWatch(self._options, self.record, pauses, turn.now_ns)
        if self.met is not None:
            nodes, world = self.met.nodes, self.met.world_size
            self.waits = NodeWaits(self._options, self.record, nodes=nodes, world=world, now_ns=turn.now_ns)
        self._parts = [part for part in (self._deadlines, self._collectives, self.waits) if part is not None]

    def excuse_stop(self, now_ns: int) -> None:
        """Exclude a stop of the whole node."""
        if self._deadlines is not None and self._collectives is not None:
            self._deadlines.excuse_stop(now_ns)
            self._collectives.excuse_stop(now_ns)

    def state(self, turn: Turn) -> NodeState:
        """Return the state of this node to report to the coordinator now."""
        record = self.record
        if not record.ranks or self.diagnosis.is_deciding or self._unread:
            return NodeState.HEALTHY
        # a hung rank that its monitor couldn't terminate counts as failed once its grace is over
        if record.unrestored is not None or record.failed or record.check_graces(turn.now_s, turn.seen):
            return NodeState.UNHEALTHY
        return NodeState.SUCCEEDED if record.all_have_ended else NodeState.HEALTHY

    def hear_of_others(self, event: DiagnoseHang | Reviewed, turn: Turn) -> None:
        """Collect evidence for the coordinator, or act on its review of all ranks."""
        if isinstance(event, DiagnoseHang) and not event.passive:
            self.diagnosis.begin(turn, from_ns=turn.now_ns, known=set())
        elif self._collectives is None or self.met is None:
            return
        elif isinstance(event, Reviewed) and event.decides:
            verdict = self.last_look.reviewed(event, turn)
            if verdict is not None:
                self._end_missing(verdict, event, turn)
        elif isinstance(event, DiagnoseHang):
            self._collectives.collect(turn, looks=event.looks)
        elif (verdict := self._collectives.reviewed(event, self.met.group_rank, turn)) is None:
            return
        elif self._options.min_healthy:
            self._end_missing(verdict, event, turn)
        else:
            self.diagnosis.found(verdict, turn, is_seen=False)

    def _end_missing(self, verdict: RankHung, review: Reviewed, turn: Turn) -> None:
        """Terminate the rank of this node that keeps the others waiting; these go on."""
        if self._deadlines is not None:
            self.record.locate(verdict.rank, review.text.removeprefix(f"rank {verdict.rank} "))
            self.record.found_by_launcher(verdict, turn.now_s, turn.seen)
            self._deadlines.end({verdict.local_rank}, turn)

    def would_hang(self, verdict: RankHung, turn: Turn) -> None:
        """Ask all nodes what keeps a rank beyond a report-only timeout."""
        is_here = verdict.cycle == self.record.cycle and verdict.local_rank in self.record.started
        if is_here and (verdict.timed, verdict.iteration) not in self._reported:
            self._reported.add((verdict.timed, verdict.iteration))
            turn.do(Hang(self.record.cycle, verdict, passive=True))

    def hear(self, event: events.Event, turn: Turn) -> None:
        """Take an event of a rank, or of its monitor; a monitor's may be about an earlier cycle."""
        match event:
            case RankStarted():
                self.record.created(event)
            case RankExited():
                self._exited(event, turn)
            case RestoreFailed() if event.cycle == self.record.cycle and event.rank in self.record.ranks:
                self.record.not_restored(event)
                turn.do(Write(event))
            case events.MonitorReport(local_rank, Signalled() as signalled):
                self.record.signalled(local_rank, signalled)
            case events.MonitorReport(local_rank, report):
                if report.cycle == self.record.cycle and local_rank < len(self.record.ranks):
                    self._hear_monitor(local_rank, report, turn)

    def _hear_monitor(self, local_rank: int, report: RankReport, turn: Turn) -> None:
        match report:
            case Attached():
                self.record.attached(local_rank, report)
                if self._deadlines is not None and not report.watch_only:
                    self._deadlines.attached(local_rank)
            case Detached(at_ns=at_ns) if self._deadlines is not None:
                self._deadlines.detached(local_rank, at_ns or turn.now_ns, turn)
            case FirstStep():
                self.record.trains(local_rank, report)
            case Observation(note=note):
                # a restart within the process may have changed the number that the rank gives itself
                note = msgspec.structs.replace(note, rank=self.record.ranks[local_rank], local_rank=local_rank)
                if local_rank in self.record.hung:
                    self.record.hang_notes.setdefault(local_rank, note)
                if self._deadlines is not None and self._collectives is not None:
                    self._deadlines.noted(note)
                    self._collectives.noted(note)
                self.diagnosis.noted(note, turn)
            case Suspect(verdict) if local_rank in self.record.started:
                self.last_look.suspected(verdict, turn)
            case RankHung() if local_rank in self.record.started:
                self.record.found_by_monitor(report, turn.now_s, turn.seen)
                self.diagnosis.found(report, turn)

    def _exited(self, event: RankExited, turn: Turn, *, waits: bool = True) -> None:
        ended = self.record.exited(event, turn.seen)
        if waits and ended.unread and turn.now_ns < ended.at_ns + _READABLE_NS:
            self._unread.add(ended.local_rank)
            return
        self._unread.discard(ended.local_rank)
        turn.do(Write(ended, at_ns=ended.at_ns))
        # otherwise it may be the cause, though it was signalled
        ended_by_itself = not ended.by_us or was_ending(ended)
        if ended.exitcode and ended_by_itself and ended.local_rank not in self.record.hung:
            turn.do(KeepEvidence(ended))
            if ended.after_run:
                turn.say(describe_exit(ended))
            elif self.record.own_failure(turn.seen) is not None:
                self.diagnosis.explain()
            elif is_secondary_failure(ended):
                self.diagnosis.lost_peer(ended, turn)

    def told(self, message: Lags, turn: Turn) -> None:
        """Ranks lag, or do so no more."""
        if message.cycle == self.record.cycle and self.waits is not None:
            self.waits.hear(message, turn)

    def alarm_ns(self, now_ns: int) -> int | None:
        """Latest time of the next ``go_on`` and ``state``."""
        grace_due_s = self.record.grace_due_s(now_ns / 1e9)
        return earliest(
            self.diagnosis.alarm_ns,
            *(part.alarm_ns for part in self._parts),
            None if grace_due_s is None else round(grace_due_s * 1e9),
            now_ns + _READ_AGAIN_NS if self._unread else None,
            self.record.cut_short_due_ns,
        )

    def read_late_words(self, turn: Turn, *, waits: bool = True) -> None:
        """Read the error files again that could not be read."""
        for local_rank in sorted(self._unread):
            self._exited(self.record.exits[local_rank], turn, waits=waits)

    def go_on(self, turn: Turn, *, is_stopping: bool) -> None:
        """Do what is due. ``is_stopping``: the launcher was asked to stop."""
        self.read_late_words(turn)
        self.record.check_cut_short(turn.now_ns, turn.seen)
        for part in self._parts:
            part.go_on(turn, is_stopping=is_stopping)
        self.diagnosis.go_on(turn)


class Downtime:
    """Time from a cycle's failure to the next one's first steps; the failed ranks are gone now."""

    def __init__(self, failed: CycleRecord, turn: Turn) -> None:
        noticed_ns = failed.noticed_ns()
        self._noticed_ns = turn.now_ns if noticed_ns is None else noticed_ns
        self._stopped_ns = turn.now_ns
        self._reached = _iterations(failed, turn)

    def report_end(self, record: CycleRecord, turn: Turn) -> bool:
        """Log the phases of the start once all ranks here have completed their first step. Return True then."""
        phases = record.phases_ns()
        if phases is None or record.met_ns < self._stopped_ns:
            return False  # not yet; or late events of the failed cycle
        moments = {"stop": self._stopped_ns, **phases}
        spans = itertools.pairwise([self._noticed_ns, *moments.values()])
        seconds = {name: (b - a) / 1e9 for name, (a, b) in zip(moments, spans, strict=True)}
        turn.say_for_all(cycle_lines.training_again(record.cycle, seconds))
        before, now = self._reached, _iterations(record, turn)
        redone = None if before is None or now is None else max(0, before.last - now.first)
        turn.do(Write(TrainingAgain(cycle=record.cycle, seconds=seconds, redone=redone)))
        return True


def _iterations(record: CycleRecord, turn: Turn) -> Reached | None:
    """Return the first and last iteration of the ranks of this node; None if they report none."""
    reached = None if record.last_iteration(turn.seen) is None else record.reached(turn.seen)
    return None if reached is None or reached.first < 0 else reached
