"""Knowledge of a job about the intervals of one section, over all ranks and earlier runs; times are seconds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megatron_ft.core.codec import Count, Message, Seconds
from megatron_ft.core.timeouts.tail import Tail

MOST_RAISED = 1e6
Factor = Annotated[float, Meta(ge=1, le=MOST_RAISED)]


class PastIntervals(Message, frozen=True, kw_only=True):
    """The part of the knowledge that fades with each interval.

    Args:
        tail: of all intervals that were neither first ones of a cycle nor explained.
        explained_s: longest interval that was told from a hang; 0 if there was none.
        raised: factor by which kills have raised the timeout.
    """

    tail: Tail = ()
    explained_s: Seconds = 0.0
    raised: Factor = 1.0


class Known(Message, frozen=True, kw_only=True):
    """State of the rules for one section (`budget_rule`).

    Args:
        start: at the start of this cycle. ``now``: ``start`` and the newest sketch, which is cumulative in the cycle:
            no interval is counted twice, and a lost sketch costs nothing.
        ended: intervals of this cycle that ``now`` has.
        first_s: longest of the first intervals of this cycle; 0 if there was none.
        earlier_first_s: the same of earlier cycles that had one, the newest last.
        reference_s: timeout by the reference's rule: a moving average with one step per update.
        unexplained_s: the same without first and explained intervals.
        usual_s: geometric mean of ``unexplained_s`` over ``updates``: one slow step raises that for long.
    """

    start: PastIntervals = PastIntervals()
    now: PastIntervals = PastIntervals()
    ended: Count = 0
    first_s: Seconds = 0.0
    earlier_first_s: tuple[Seconds, ...] = ()
    reference_s: Seconds | None = None
    unexplained_s: Seconds | None = None
    usual_s: Seconds | None = None
    updates: Count = 0
