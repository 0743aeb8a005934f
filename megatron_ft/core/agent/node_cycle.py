"""One cycle on this node: what its ranks and their monitors say, and what is done and told at once. Pure."""

from __future__ import annotations

import dataclasses
import itertools

from megatron_ft.core.agent import edge, event_records, lines
from megatron_ft.core.agent.collectives import NodeCollectiveWatch
from megatron_ft.core.agent.deadlines import Deadlines
from megatron_ft.core.agent.edge import KeepEvidence, Tell
from megatron_ft.core.agent.hang import NodeHangDiagnosis
from megatron_ft.core.agent.hang_review import HangReview
from megatron_ft.core.agent.learning import NodeLearning
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.suspicion import Suspicion
from megatron_ft.core.agent.turn import Options, Turn
from megatron_ft.core.diagnosis.cycle_cause import HangVerdict
from megatron_ft.core.diagnosis.exits import is_by_us, is_secondary_failure, was_ending
from megatron_ft.core.job import edge as job
from megatron_ft.core.job.messages import Hang, Moving, Suspected
from megatron_ft.core.job.restart_policy import NodeState
from megatron_ft.core.pauses import Pauses
from megatron_ft.core.times import earliest


class NodeCycle:
    """One cycle on this node. ``met`` is None before the nodes have met."""

    def __init__(
        self, options: Options, number: int, met: edge.RanksMet | None, learning: NodeLearning, *, now_ns: int
    ) -> None:
        self.met = met
        self.record = CycleRecord(number, () if met is None else met.ranks, met_ns=now_ns)
        self.diagnosis = NodeHangDiagnosis(options, self.record, learning.killed)
        self.review = HangReview(self.record) if options.min_healthy else None
        self.suspicion = Suspicion(options, self.record, nodes=1 if met is None else met.nodes, review=self.review)
        self._options = options
        self._deadlines: Deadlines | None = None
        self._collectives: NodeCollectiveWatch | None = None
        self._reported: set[tuple[str, int | None]] = set()
        """Intervals (what is timed, and the iteration) whose hang was reported to the coordinator, and nothing else."""

    def started(self, pauses: Pauses, turn: Turn) -> None:
        """All ranks were created: watch their deadlines and collectives from now on."""
        self._deadlines = Deadlines(self._options, self.record, pauses, turn)
        self._collectives = NodeCollectiveWatch(self._options, self.record, pauses, turn.now_ns)

    def excuse_stop(self, now_ns: int) -> None:
        """The whole node was stopped and continued."""
        if self._deadlines is not None:
            self._deadlines.excuse_stop(now_ns)
        if self._collectives is not None:
            self._collectives.excuse_stop(now_ns)

    def state(self, turn: Turn) -> NodeState:
        """The state of this node, as far as the coordinator is to know it now."""
        record = self.record
        if not record.ranks or self.diagnosis.is_deciding:
            return NodeState.HEALTHY
        # a hung rank that its monitor couldn't terminate counts as failed once its grace is over
        if record.failed or record.check_graces(turn.now_s, turn.seen):
            return NodeState.UNHEALTHY
        return NodeState.SUCCEEDED if record.all_have_ended else NodeState.HEALTHY

    def hear_of_others(self, event: job.DiagnoseHang | job.Reviewed, turn: Turn) -> None:
        """The coordinator asks for evidence on the ranks of all nodes, or reports what came of it."""
        if isinstance(event, job.DiagnoseHang) and not event.passive:
            self.diagnosis.diagnose(turn)
        elif self._collectives is None or self.met is None:
            return
        elif isinstance(event, job.Reviewed) and event.decides:
            verdict = None if self.review is None else self.review.reviewed(event, turn)
            if verdict is not None:
                self._end_missing(verdict, event, turn)
        elif isinstance(event, job.DiagnoseHang):
            self._collectives.collect(turn)
        else:
            self._reviewed(event, self._collectives, self.met.group_rank, turn)

    def _reviewed(self, review: job.Reviewed, collectives: NodeCollectiveWatch, place: int, turn: Turn) -> None:
        verdict = collectives.reviewed(review, place, turn)
        if verdict is None:
            return
        if not self._options.min_healthy:
            self.diagnosis.found(verdict, turn, is_seen=False)
        else:
            self._end_missing(verdict, review, turn)

    def _end_missing(self, verdict: HangVerdict, review: job.Reviewed, turn: Turn) -> None:
        """Terminate the rank of this node that keeps the others waiting; these go on."""
        if self._deadlines is not None:
            self.record.locate(verdict.rank, review.text.removeprefix(f"rank {verdict.rank} "))
            self.record.found_by_launcher(verdict, turn.now_s, turn.seen)
            self._deadlines.end({verdict.local_rank}, turn)

    def would_hang(self, event: edge.FoundHung, turn: Turn) -> None:
        """Ask all nodes what keeps a rank for longer than a learned timeout that is only reported."""
        verdict = event.verdict
        is_here = event.cycle == self.record.cycle and event.local_rank in self.record.started
        if is_here and (verdict.timed, verdict.iteration) not in self._reported:
            self._reported.add((verdict.timed, verdict.iteration))
            turn.do(
                Tell(Hang(self.record.cycle, verdict, passive=True)),
                event_records.would_have_ended(event.cycle, verdict),
            )

    def hear(self, event: edge.Event, turn: Turn) -> None:
        """Take an event of a rank, or of its monitor; a monitor's may be about an earlier cycle."""
        match event:
            case edge.RankStarted():
                self.record.created(event)
            case edge.RankExited():
                self._exited(event, turn)
            case edge.Signalled():
                self.record.signalled(event)
            case _ if isinstance(event, edge.FromMonitor):
                if event.cycle == self.record.cycle and event.local_rank < len(self.record.ranks):
                    self._hear_monitor(event, turn)

    def _hear_monitor(self, event: edge.FromMonitor, turn: Turn) -> None:
        match event:
            case edge.Attached():
                self.record.attached(event)
                if self._deadlines is not None and not event.watch_only:
                    self._deadlines.attached(event.local_rank)
            case edge.Detached() if self._deadlines is not None:
                self._deadlines.detached(event, turn)
            case edge.Trains():
                self.record.trains(event)
            case edge.EvidenceCollected():
                # a restart within the process may have changed the number that the rank gives itself
                note = dataclasses.replace(event.note, rank=self.record.ranks[event.local_rank])
                event = dataclasses.replace(event, note=note)
                if event.local_rank in self.record.hung:
                    self.record.hang_notes.setdefault(event.local_rank, event.note)
                if self._deadlines is not None:
                    self._deadlines.noted(event)
                if self._collectives is not None:
                    self._collectives.noted(event)
                self.diagnosis.noted(event, turn)
            case edge.Suspected() if event.local_rank in self.record.started:
                self._suspected(event.verdict, turn)
            case edge.ProgressChecked():
                self.suspicion.checked(event.local_rank, event.progress, turn)
            case edge.FoundHung() if event.local_rank in self.record.started:
                self.record.found_by_monitor(event.verdict, turn.now_s, turn.seen)
                self.diagnosis.found(event.verdict, turn)

    def _suspected(self, verdict: HangVerdict, turn: Turn) -> None:
        if self.review is not None and not verdict.learned:
            self.review.suspected(verdict, turn)
        else:
            self.suspicion.suspected(verdict, turn)

    def _exited(self, event: edge.RankExited, turn: Turn) -> None:
        ended = self.record.exited(event, turn.seen)
        turn.do(event_records.rank_exited(self.record.cycle, ended))
        ended_by_itself = not is_by_us(ended) or was_ending(ended)  # then it may be the cause, though we signalled it
        if ended.exitcode and ended_by_itself and ended.local_rank not in self.record.hung:
            turn.do(KeepEvidence(self.record.cycle, ended))
            if self.record.own_failure(turn.seen) is not None:
                self.diagnosis.explain()
            elif is_secondary_failure(ended):
                self.diagnosis.lost_peer(ended, turn)

    def told(self, message: Suspected | Moving, turn: Turn) -> None:
        """Another node asks for a check of progress, or reports progress, because a learned timeout is over."""
        if message.cycle != self.record.cycle:
            return
        match message:
            case Suspected(between_s=between_s):
                self.suspicion.check_progress(between_s, turn)
            case Moving(progress=progress):
                self.suspicion.moving(progress, turn)

    def alarm_ns(self, now_ns: int) -> int | None:
        """When ``go_on`` and ``state`` are to be called at the latest."""
        grace_due_s = self.record.grace_due_s(now_ns / 1e9)
        return earliest(
            self.diagnosis.alarm_ns,
            self.suspicion.alarm_ns,
            None if self._deadlines is None else self._deadlines.alarm_ns,
            None if self._collectives is None else self._collectives.alarm_ns,
            None if grace_due_s is None else round(grace_due_s * 1e9),
        )

    def go_on(self, turn: Turn, *, is_stopping: bool) -> None:
        """Do what is due. ``is_stopping``: the launcher was asked to stop."""
        if self._deadlines is not None:
            self._deadlines.go_on(turn, is_stopping=is_stopping)
        self.suspicion.go_on(turn)
        if self._collectives is not None:
            self._collectives.go_on(turn, is_stopping=is_stopping)
        self.diagnosis.go_on(turn)


class Downtime:
    """From a cycle's failure to the next one's first steps; at ``now_ns`` the ranks of the first are gone."""

    def __init__(self, failed: CycleRecord, now_ns: int) -> None:
        noticed_ns = failed.noticed_ns()
        self._noticed_ns = now_ns if noticed_ns is None else noticed_ns
        self._stopped_ns = now_ns

    def report_end(self, record: CycleRecord, turn: Turn) -> bool:
        """Log the phases of the start once all ranks here have completed their first step; returns True then."""
        phases = record.phases_ns()
        if phases is None or record.met_ns < self._stopped_ns:
            return False  # not yet; or it is the cycle that failed, of which events still come
        moments = {"stop": self._stopped_ns, **phases}
        spans = itertools.pairwise([self._noticed_ns, *moments.values()])
        seconds = {name: (b - a) / 1e9 for name, (a, b) in zip(moments, spans, strict=True)}
        turn.say_for_all(lines.training_again(record.cycle, seconds))
        turn.do(event_records.training_again(record.cycle, seconds))
        return True
