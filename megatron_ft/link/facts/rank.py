"""Records of a training process, which creates its log only with the first record."""

from __future__ import annotations

from megatron_ft.link.base.codec import Cycle, Fact, Int, Rank


class FaultInjected(Fact, frozen=True, kw_only=True):
    """This rank is about to carry out a planned or simulated fault.

    Args:
        type: type of the fault: "rank_killed", "rank_hung", ...
        iteration: iteration completed by then; null for a fault after a delay.
    """

    cycle: Cycle
    type: str | None = None
    rank: Rank | None = None
    iteration: Int | None = None


Record = FaultInjected
