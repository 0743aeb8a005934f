"""The last look at the rank of this monitor: its launcher is asked before an overdue rank counts as hung."""

from __future__ import annotations

import time
from functools import partial

from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.learning.progress import ProgressSample, is_file_wait
from megatron_ft.link.base.intervals import IntervalKey
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.proc import scheduled_ns, transferred_bytes, waiting_channels
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.messages.monitor_messages import ExtendTimeout, Suspect
from megatron_ft.monitor.collect_evidence import Probe
from megatron_ft.monitor.process import AttachedRank
from megatron_ft.monitor.reports import Reports
from megatron_ft.monitor.watched_rank import WatchedRank

_ANSWER_NS = round((EVIDENCE_S + 1.0) * 1e9)
"""Nanoseconds to wait for the launcher's answer."""
_ASK_S = 0.4
_READ_S = 0.2
_SAMPLES = 10
_reads = FileQueue()


class LastLook:
    """The questions about the rank of this monitor.

    While the launcher is asked, the overdue interval goes on: its rank may do so, too. If no answer comes within
    `_ANSWER_NS`, the interval is overdue again: the rank hangs, or, if the timeout isn't enforced, is asked about anew.

    ``has_launcher``: there is one to ask. ``asks_first``: ask it about configured timeouts too, not only learned ones.
    """

    def __init__(self, reports: Reports, *, has_launcher: bool, asks_first: bool = False) -> None:
        self._asks_first = asks_first
        self._reports = reports
        self._has_launcher = has_launcher
        self._last: RankHung | None = None
        """The launcher was asked about this verdict last; None once it has extended the timeout."""
        self._asked: dict[tuple[IntervalKey, bool], bool] = {}
        """Interval, and whether its timeout is enforced -> True if the launcher has confirmed that the rank hangs."""

    def ask_launcher_first(self, watched: WatchedRank, verdict: RankHung) -> bool:
        """Ask the launcher, where that is due. Return False if the rank is to be treated as hung now."""
        question, asks = (verdict.key, verdict.enforced), self._has_launcher and (verdict.learned or self._asks_first)
        is_confirmed = self._asked.get(question)
        if not asks or is_confirmed or (is_confirmed is False and verdict.enforced):  # False: there was no answer
            return False
        self._last, self._asked[question] = verdict, False
        watched.detector.extend_timeout(verdict, round(verdict.elapsed_s * 1e9) + _ANSWER_NS)
        self._reports.tell(Suspect(self._reports.rank_hung(watched.attached, verdict)))
        return True

    def clear(self) -> None:
        """Forget all questions: ask about an interval that is still overdue again."""
        self._last, self._asked = None, {}

    def obey(self, watched: WatchedRank, order: ExtendTimeout) -> None:
        """Take the launcher's answer; the next check of the board decides, because the rank may have moved on."""
        if (verdict := self._last) is not None:
            watched.detector.extend_timeout(verdict, round(order.timeout_s * 1e9))
            self.clear()
            if not order.timeout_s:
                self._asked[verdict.key, verdict.enforced] = True


def take_sample(attached: AttachedRank, snapshot: BoardSnapshot | None) -> ProgressSample:
    """Sample what a rank is doing, within a bound. It gets only a question, which a thread of its own answers."""
    at_ns = time.monotonic_ns()
    stat = read_stat(attached.pid)
    probe = Probe(attached, snapshot, at_ns + round(_ASK_S * 1e9), freeze=False)
    answer = probe.ask("" if stat is None else stat.state, [], samples=_SAMPLES)
    ran_ns, starved_ns = scheduled_ns(attached.pid, attached.pid)
    told = answer.collectives
    entered, completed = (None, None) if told.error else (told.enqueued, told.completed)
    stacks = [each for each in answer.places if each]
    # reading takes long if a process of the rank is stuck in an exec
    transferred = _reads.call(partial(transferred_bytes, attached.pid), dict[int, int](), bound_s=_READ_S)
    return ProgressSample(
        at_ns=at_ns,
        events=None if snapshot is None else snapshot.ring_head,
        entered=entered,
        completed=completed,
        stacks=frozenset(stacks),
        frame=stacks[-1][0].partition(" @")[0] if stacks else "",
        cpu_ns=ran_ns + starved_ns,
        starved_ns=starved_ns,
        transferred=transferred or None,
        file_waits={tid: each for tid, each in waiting_channels(attached.pid).items() if is_file_wait(each)},
    )
