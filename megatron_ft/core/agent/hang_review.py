"""Under ``min-healthy`` a rank whose timeout is over is terminated only if the others wait for that rank. Pure.

The nodes go on without a rank that hangs, so those that only wait for it must live. A monitor asks here before it
reports its rank as hung; the coordinator has evidence collected on the ranks of all nodes, which go on, and tells all
nodes which rank is missing. A suspect that only waits may wait for its timeout once more.
"""

from __future__ import annotations

import dataclasses

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.edge import ConfirmHang, ExtendTimeout, Say, Tell
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Turn
from megatron_ft.core.diagnosis.cycle_cause import HangVerdict
from megatron_ft.core.job.messages import Hang
from megatron_ft.core.job.reports import Reviewed


class HangReview:
    """The suspects of one cycle on this node."""

    def __init__(self, record: CycleRecord) -> None:
        self._record = record
        self._suspects: dict[int, HangVerdict] = {}
        """By local rank."""

    def suspected(self, verdict: HangVerdict, turn: Turn) -> None:
        """A timeout of a rank of this node is over: have all ranks of the job examined."""
        verdict = dataclasses.replace(verdict, rank=self._record.ranks[verdict.local_rank])
        self._suspects[verdict.local_rank] = verdict
        turn.do(Tell(Hang(self._record.cycle, verdict, passive=True, decides=True)))

    def reviewed(self, review: Reviewed, turn: Turn) -> HangVerdict | None:
        """Confirm the suspects that hang, and let the others wait on.

        Returns the verdict on the rank of this node that keeps the others waiting, if its own timeout isn't over.
        """
        suspects, self._suspects = self._suspects, {}
        for local_rank, verdict in sorted(suspects.items()):
            if not review.hanging or verdict.rank in review.hanging or local_rank not in self._record.running:
                turn.do(ConfirmHang(local_rank))
                continue
            turn.do(
                ExtendTimeout(local_rank, verdict.elapsed_s + verdict.timeout_s),
                Say(lines.only_waits(verdict, review.text)),
            )
        rank = review.rank
        if review.hanging != (rank,) or rank is None or rank not in self._record.ranks:
            return None
        local_rank = self._record.ranks.index(rank)
        if local_rank in suspects or local_rank not in self._record.running or local_rank in self._record.hung:
            return None
        return HangVerdict(
            rank=rank,
            local_rank=local_rank,
            kind=review.kind,
            section=review.section,
            elapsed_s=review.elapsed_s,
            timeout_s=review.timeout_s,
            iteration=review.iteration,
            at_ns=turn.now_ns,
        )
