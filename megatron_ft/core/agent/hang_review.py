"""Review of suspects with ``min-healthy``: a rank is terminated only if others wait for it. Pure.

The nodes go on without a rank that hangs, so those that only wait for it must live. A monitor asks here before it
reports its rank as hung; the coordinator has evidence collected on the ranks of all nodes, which go on, and tells all
nodes which rank is missing. A suspect that only waits may wait for its timeout once more.
"""

from __future__ import annotations

import msgspec

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.edge import OrderMonitor
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.step import Step
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.job.edge import Say
from megatron_ft.core.job.messages import Hang, Reviewed
from megatron_ft.core.messages.monitor import ConfirmHang, ExtendTimeout


class HangReview:
    """The suspects of one cycle on this node."""

    def __init__(self, record: CycleRecord) -> None:
        self._record = record
        self._suspects: dict[int, RankHung] = {}
        """Suspects by local rank."""

    def suspected(self, verdict: RankHung, turn: Step) -> None:
        """Have all ranks of the job examined, because a timeout of a rank of this node is over."""
        verdict = msgspec.structs.replace(verdict, rank=self._record.ranks[verdict.local_rank])
        self._suspects[verdict.local_rank] = verdict
        turn.do(Hang(self._record.cycle, verdict, passive=True, decides=True))

    def reviewed(self, review: Reviewed, turn: Step) -> RankHung | None:
        """Confirm the suspects that hang, and let the others wait on.

        Return the verdict on the rank of this node that keeps the others waiting, if its own timeout isn't over.
        """
        suspects, self._suspects = self._suspects, {}
        for local_rank, verdict in sorted(suspects.items()):
            if not review.hanging or verdict.rank in review.hanging or local_rank not in self._record.running:
                turn.do(OrderMonitor(local_rank, ConfirmHang(verdict.cycle)))
                continue
            turn.do(
                OrderMonitor(local_rank, ExtendTimeout(verdict.cycle, verdict.elapsed_s + verdict.timeout_s)),
                Say(lines.only_waits(verdict, review.text)),
            )
        rank = review.rank
        if review.hanging != (rank,) or rank is None or rank not in self._record.ranks:
            return None
        local_rank = self._record.ranks.index(rank)
        if local_rank in suspects or local_rank not in self._record.running or local_rank in self._record.hung:
            return None
        return RankHung(
            rank=rank,
            cycle=self._record.cycle,
            local_rank=local_rank,
            kind=review.kind,
            since_ns=max(0, turn.now_ns - round(review.elapsed_s * 1e9)),
            section=review.section,
            elapsed_s=review.elapsed_s,
            timeout_s=review.timeout_s,
            iteration=review.iteration,
            at_ns=turn.now_ns,
        )
