"""The last look at the rank of this monitor: its launcher is asked before an overdue rank counts as hung.

Without an answer of the launcher, a rank that exceeds an enforced timeout is terminated; one that exceeds a timeout
that isn't enforced is not even reported.
"""

from __future__ import annotations

import time
from functools import partial

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.learning.progress import ProgressSample, is_file_wait
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.proc import main_thread_ns, transferred_bytes, waiting_channels
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.messages.monitor_messages import Collect, ConfirmHang, ExtendTimeout, Suspect
from megatron_ft.monitor.collect_evidence import Probe
from megatron_ft.monitor.process import AttachedRank
from megatron_ft.monitor.reports import Reports
from megatron_ft.monitor.watched_rank import WatchedRank

_ANSWER_NS = round((EVIDENCE_S + 1.0) * 1e9)
"""Nanoseconds to wait for the launcher's answer; then an enforced timeout counts as confirmed."""
_ASK_S = 0.4
_READ_S = 0.2
_SAMPLES = 10
_reads = FileQueue()


class LastLook:
    """The suspicion about the rank of this monitor.

    ``has_launcher``: there is a launcher to ask, which has all ranks examined. ``asks_first``: ask it about
    configured timeouts too, not only learned ones.
    """

    def __init__(self, reports: Reports, *, has_launcher: bool, asks_first: bool = False) -> None:
        self._asks_first = asks_first
        self._reports = reports
        self._has_launcher = has_launcher
        self._verdict: RankHung | None = None
        self._answer_by_ns: int | None = None
        """Time until which the launcher is waited for; None if the verdict is confirmed, or there is none."""
        self.first: tuple[Collect, ProgressSample] | None = None  # being examined: the order, and what it did then

    @property
    def due_ns(self) -> int | None:
        """Time of the next ``act``, None if nothing is pending."""
        times = [] if self.first is None else [self.first[0].again_ns or 0]
        return earliest(*times, self._answer_by_ns)

    def ask_launcher_first(self, watched: WatchedRank, verdict: RankHung) -> bool:
        """Ask the launcher, or put the verdict off, where that is due. Return False if the rank is to be treated as
        hung now."""
        mine = self._verdict
        is_same = mine is not None and mine.key == verdict.key and mine.enforced == verdict.enforced
        if not self._has_launcher and not verdict.enforced:
            watched.put_off(verdict)
            return True
        asks = self._has_launcher and (verdict.learned or self._asks_first)
        if not asks or (is_same and self._answer_by_ns is None):
            self.clear()
            return False
        if not is_same:
            now_ns = time.monotonic_ns()
            self._verdict, self._answer_by_ns = verdict, now_ns + _ANSWER_NS
            self._reports.tell(Suspect(self._reports.rank_hung(watched.attached, verdict)))
        return True

    def clear(self) -> None:
        self._verdict = self._answer_by_ns = None

    def obey(self, watched: WatchedRank, order: ExtendTimeout | ConfirmHang) -> bool:
        """Follow an order of the launcher. Return True if the board is to be checked now."""
        if self._verdict is None:
            return False
        if isinstance(order, ExtendTimeout):
            watched.detector.extend_timeout(self._verdict, round(order.timeout_s * 1e9))
            self.clear()
        else:
            self._answer_by_ns = None  # the next check of the board decides: the rank may have moved on
        return True

    def give_up_waiting(self, watched: WatchedRank) -> bool:
        """Return True if the board is to be checked, because the launcher's answer is overdue."""
        if self._verdict is None or self._answer_by_ns is None or time.monotonic_ns() < self._answer_by_ns:
            return False
        if not self._verdict.enforced:
            watched.put_off(self._verdict)
            self._verdict = None
        self._answer_by_ns = None
        return True


def take_sample(attached: AttachedRank, snapshot: BoardSnapshot | None) -> ProgressSample:
    """Sample what a rank is doing, within a bound.

    The rank may run on: it gets only a question, which its own thread answers.
    """
    at_ns = time.monotonic_ns()
    stat = read_stat(attached.pid)
    probe = Probe(attached, snapshot, at_ns + round(_ASK_S * 1e9), freeze=False)
    answer = probe.ask("" if stat is None else stat.state, [], samples=_SAMPLES)
    ran_ns, starved_ns = main_thread_ns(attached.pid)
    told = answer.collectives
    entered, completed = (told.enqueued, told.completed) if isinstance(told, Collectives) else (None, None)
    stacks = [each for each in answer.places if each]
    # reading takes long if a process of the rank is stuck in an exec
    transferred = _reads.call(partial(transferred_bytes, attached.pid), dict[int, int](), bound_s=_READ_S)
    return ProgressSample(
        at_ns=at_ns,
        iterations=0 if snapshot is None else snapshot.iterations_seen,
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
