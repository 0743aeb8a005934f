"""A rank was found hung: have the ranks of this node looked at, in bounded time, and tell the coordinator what is seen.

The coordinator lets all nodes look at theirs, and finds who is the cause. The monitor that spoke the verdict ends its
rank when the cycle is ended, or when its own bound is over: nobody waits for what can't be had. Where the nodes decide
for themselves (``min-healthy``, or a rendezvous of torch's), so does this: ranks that weren't found hung may go on
living, so nothing is sent to them.
"""

from __future__ import annotations

import dataclasses
import time

from megatron_ft.core.diagnosis.exceptions import LastWords
from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import LOOK_S, RankNote
from megatron_ft.core.job.inquest import blamed
from megatron_ft.core.job.messages import Hang, Notes
from megatron_ft.core.messages.monitor import Report, Seen
from megatron_ft.core.records.shared import Verdict
from megatron_ft.launcher.base.event_loop import Timer
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.cycle import announce
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.monitors.reports import hang_verdict
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes import crash_evidence

__all__ = ["Inquest"]

_LAST_NOTES_S = 0.15
"""Before the bound is over, what has been seen by then is told: it has a way to go."""


class Inquest:
    """Of one cycle on this node. Times are ``time.monotonic`` seconds.

    Args:
        coordination: whose coordinator decides; None: this node decides, for itself.
        are_all: no rank of the job is on another node.
    """

    def __init__(
        self, node: Node, record: CycleRecord, coordination: Coordination | None, *, are_all: bool = True
    ) -> None:
        self._node = node
        self._record = record
        self._coordination = coordination
        self._are_all = are_all
        self._notes: dict[int, RankNote] = {}
        """By local rank."""
        self._verdict: HangVerdict | None = None
        """The first of this node."""
        self._bound_s: float | None = None
        self._asked: set[int] = set()
        self._is_told = False
        self._is_over = False
        self._timer: Timer | None = None

    def heard(self, local_rank: int, report: Report) -> None:
        """What a monitor says."""
        if not isinstance(report, Verdict | Seen) or report.cycle != self._record.cycle:
            return
        if self._is_over:
            self._node.monitors.release()
        elif isinstance(report, Seen):
            note, before = report.note, self._notes.get(local_rank)
            if before is not None:
                # what was looked at first counts: since then a rank may have been stopped by its monitor
                note = dataclasses.replace(before, found_hung=before.found_hung or note.found_hung)
            self._notes[local_rank] = note
            self._go_on()
        elif not report.observed_only:
            verdict = hang_verdict(report, local_rank=local_rank)
            if verdict.learned:
                self._node.raised_timeouts.killed(verdict.timed, self._record.cycle)
            self._verdict = self._verdict or verdict
            self._begin(at_s=verdict.at_ns / 1e9, known={local_rank})

    def look(self) -> None:
        """A rank of another node hangs: look at those of this one."""
        self._begin(at_s=time.monotonic(), known=set())

    def close(self) -> None:
        """The cycle is being ended: nobody is looked at any more, and who was found hung needn't wait for that."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_over = True
        self._node.monitors.release()

    @property
    def is_deciding(self) -> bool:
        """This node decides, and the cause may still become known: its state isn't told before."""
        return self._coordination is None and self._bound_s is not None and not self._is_over

    def _begin(self, *, at_s: float, known: set[int]) -> None:
        """Have all ranks looked at that nobody has looked at; ``known`` are looked at already."""
        if self._bound_s is not None or self._is_over:
            return
        self._bound_s = at_s + LOOK_S
        if self._coordination is not None and self._verdict is not None:
            # a job isn't given up for timeouts of our own making
            reached = self._record.reached() if self._verdict.is_certain else None
            self._coordination.tell(Hang(self._coordination.cycle, self._verdict, reached))
        self._asked = self._alive()
        for local_rank in self._asked - known:
            passive = self._node.is_min_healthy
            self._node.monitors.collect(local_rank, passive=passive, deadline_ns=round(self._bound_s * 1e9))
        self._timer = self._node.reactor.call_later(self._bound_s - _LAST_NOTES_S - time.monotonic(), self._go_on)
        self._go_on()

    def _go_on(self) -> None:
        """Tell, or decide, once everything that can be seen is."""
        if self._bound_s is None or self._is_told:
            return
        is_late = time.monotonic() >= self._bound_s - _LAST_NOTES_S
        if not (is_late or self._asked & self._alive() <= self._notes.keys()):
            return
        self._is_told = True
        notes = self._local()
        if self._coordination is not None:
            self._coordination.tell(Notes(self._coordination.cycle, tuple(notes)))
        elif self._verdict is not None:
            found = self._record.found = blamed(notes, self._verdict, are_all=self._are_all, several=False)
            if found is not None:
                announce.finding(self._node, self._record, found)
            self.close()

    def _alive(self) -> set[int]:
        """Local ranks whose processes run and whose monitors watch them."""
        running = self._record.workers.keys() - self._record.exits.keys()
        return {local_rank for local_rank in running if self._node.monitors.watches(local_rank, self._record.cycle)}

    def _local(self) -> list[RankNote]:
        """A note on each rank of this node, with what is known of those that nobody could look at."""
        return [self._notes.get(local_rank) or self._little(local_rank) for local_rank in self._record.workers]

    def _little(self, local_rank: int) -> RankNote:
        worker = self._record.workers[local_rank]
        gone = local_rank in self._record.exits
        words = crash_evidence.read_last_words(self._node, self._record, local_rank) if gone else LastWords()
        return RankNote(
            rank=self._record.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            iteration=self._record.iteration_of(local_rank),
            gone=gone,
            raised=words.error,
            frame=words.where,
        )
