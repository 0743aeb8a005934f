"""Suspicion of ranks by learned timeouts: a rank counts as hung only if no rank of the job makes progress. Pure.

A monitor asks here when its rank has exceeded a learned timeout. All ranks of the job are observed twice, and while one
of them makes progress the suspects get more time, a quarter more each time, up to the limit of the interval (`MOST`
timeouts, if it has none): some ranks only seem to move. If none does, the hang is confirmed: the rank is terminated, or
only reported, if its timeout isn't enforced.

Where the nodes decide for themselves (``min-healthy``, or a rendezvous of torch's), only the ranks of this node can be
asked, and those of other nodes may be what this one waits for. Then no hang is confirmed before the longest interval
that was ever extended, and a quarter more, is over.
"""

from __future__ import annotations

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.edge import OrderMonitor, Write
from megatron_ft.core.agent.hang_review import HangReview
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.step import Options, Step
from megatron_ft.core.facts.launcher import MoreTime
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.job.edge import Say
from megatron_ft.core.job.messages import RankProgressing, Suspected
from megatron_ft.core.messages.monitor import CheckProgress, ConfirmHang, ExtendTimeout

CHECK_S = 1.9
"""Most seconds from a suspicion until the hang is confirmed: a starved rank answers late."""
MOST = 4.0
"""Limit of an interval that has none of its own, as a multiple of its timeout."""
_MORE = 1.25
_LEAST_MORE_S = 1.0
_SHARE, _LEAST_S, _LONGEST_S = 0.2, 0.1, 1.0
"""Time between two observations: this share of the timeout, within these bounds in seconds."""
_FRESH_NS = 2_000_000_000
"""Age up to which another node's progress counts: not all nodes suspect in the same moment."""


class NodeSuspicions:
    """The suspected ranks of one cycle on this node.

    ``review``, if given, decides finally whether a suspect hangs when no rank makes progress.
    """

    def __init__(
        self,
        options: Options,
        record: CycleRecord,
        *,
        nodes: int,
        review: HangReview | None = None,
    ) -> None:
        self._record = record
        self._review = review
        self._observes_only = options.observe_only
        self._sees_all_ranks = nodes == 1 or not options.min_healthy
        self._asks_others = nodes > 1 and not options.min_healthy
        self._suspects: dict[int, RankHung] = {}
        """Suspects by local rank."""
        self._given: set[tuple[int, int, str]] = set()
        """Extended intervals that were reported to the user, each once."""
        self._awaited: set[int] = set()
        """Local ranks whose progress is being checked."""
        self._bound_ns: int | None = None
        self._elsewhere: tuple[int, str] | None = None
        """Time and text of another node's last report of progress."""
        self._is_over = False

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next ``go_on``."""
        return self._bound_ns

    def suspected(self, verdict: RankHung, turn: Step) -> None:
        """Check for progress, because a learned timeout of a rank of this node is over."""
        if self._is_over:
            return
        if verdict.elapsed_s >= _most_s(verdict):
            if verdict.enforced and not self._observes_only:
                turn.do(Say(lines.most_time_is_over(verdict, _most_s(verdict))))
            self._confirm(verdict, turn)
            return
        self._suspects[verdict.local_rank] = verdict
        if self._elsewhere is not None and turn.now_ns - self._elsewhere[0] < _FRESH_NS:
            self._extend_timeout(self._elsewhere[1], turn)
            return
        between_s = min(max(_SHARE * verdict.timeout_s, _LEAST_S), _LONGEST_S)
        if self._asks_others:
            turn.do(Suspected(self._record.cycle, between_s))
        self.check_progress(between_s, turn)

    def check_progress(self, between_s: float, turn: Step) -> None:
        """Have the ranks of this node observed twice, for a suspicion here or on another node."""
        if self._bound_ns is not None or self._is_over:
            return  # the current check counts for this, too
        self._awaited = self._record.observed
        again_ns = turn.now_ns + round(between_s * 1e9)
        self._bound_ns = turn.now_ns + round(CHECK_S * 1e9)
        order = CheckProgress(self._record.cycle, again_ns)
        turn.do(*(OrderMonitor(local_rank, order) for local_rank in sorted(self._awaited)))

    def moving(self, text: str, turn: Step) -> None:
        """Extend the suspects' timeouts, because a rank of another node makes progress."""
        self._elsewhere = turn.now_ns, text
        self._extend_timeout(text, turn)

    def checked(self, local_rank: int, progress: str, turn: Step) -> None:
        """Record a monitor's check of its rank's progress."""
        if self._bound_ns is None:
            return
        self._awaited.discard(local_rank)
        if progress:
            text = f"rank {self._record.ranks[local_rank]} {progress}"
            self._bound_ns, self._awaited = None, set()
            if self._asks_others:
                turn.do(RankProgressing(self._record.cycle, text))
            self._extend_timeout(text, turn)
        else:
            self.go_on(turn)

    def go_on(self, turn: Step) -> None:
        """Confirm the hang once no rank is found to make progress."""
        is_open = bool(self._awaited) or self._asks_others
        if self._bound_ns is None or (is_open and turn.now_ns < self._bound_ns):
            return
        self._bound_ns, self._awaited = None, set()
        suspects, self._suspects = self._suspects, {}
        for _, verdict in sorted(suspects.items()):
            self._decide(verdict, turn)

    def _decide(self, verdict: RankHung, turn: Step) -> None:
        """Confirm the hang, or put it off, because no rank that can be asked makes progress."""
        # the limit is that many times the longest interval that was extended
        least_s = 0.0 if verdict.limit_s is None else _MORE * verdict.limit_s / MOST
        if verdict.elapsed_s < least_s and not self._sees_all_ranks:
            turn.do(OrderMonitor(verdict.local_rank, ExtendTimeout(verdict.cycle, least_s)))
        else:
            self._confirm(verdict, turn)

    def _confirm(self, verdict: RankHung, turn: Step) -> None:
        if self._review is not None and verdict.enforced and not self._observes_only:
            self._review.suspected(verdict, turn)
        else:
            turn.do(OrderMonitor(verdict.local_rank, ConfirmHang(verdict.cycle)))

    def close(self) -> None:
        """Stop: all ranks are about to be terminated."""
        self._bound_ns, self._suspects, self._awaited, self._is_over = None, {}, set(), True

    def _extend_timeout(self, progress: str, turn: Step) -> None:
        suspects, self._suspects = self._suspects, {}
        self._bound_ns = None if suspects else self._bound_ns
        news = []
        for local_rank, verdict in sorted(suspects.items()):
            elapsed_s, most_s = verdict.elapsed_s, _most_s(verdict)
            until_s = min(max(_MORE * elapsed_s, elapsed_s + _LEAST_MORE_S), most_s)
            extended = MoreTime(
                rank=verdict.rank,
                local_rank=verdict.local_rank,
                cycle=verdict.cycle,
                kind=verdict.kind,
                section=verdict.section,
                iteration=verdict.iteration,
                elapsed_s=verdict.elapsed_s,
                timeout_s=verdict.timeout_s,
                until_s=until_s,
                progress=progress,
            )
            turn.do(OrderMonitor(local_rank, ExtendTimeout(verdict.cycle, until_s)), Write(extended))
            key = (local_rank, -1 if verdict.iteration is None else verdict.iteration, verdict.timed)
            if verdict.enforced and key not in self._given:
                self._given.add(key)
                news.append(verdict)
        if news:
            turn.do(Say(lines.more_time(news, progress, _most_s(news[0]))))


def _most_s(verdict: RankHung) -> float:
    return MOST * verdict.timeout_s if verdict.limit_s is None else verdict.limit_s
