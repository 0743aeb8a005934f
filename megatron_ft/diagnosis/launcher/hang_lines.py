"""The launcher's lines about hangs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.diagnosis.cycle_cause import after_iteration, describe_hang, describe_interval
from megatron_ft.diagnosis.hang_messages import Reviewed
from megatron_ft.diagnosis.root_cause import spans
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.shared import RankHung


def observed(verdict: RankHung) -> str:
    """Format a hang with ``--ft-observe-only``."""
    return f"{describe_hang(verdict)}{after_iteration(verdict)}: not killed (observe-only)"


def more_time(verdicts: Sequence[RankHung], progress: str, most_s: float) -> str:
    """Format that suspected ranks get more time because of ``progress``, until ``most_s`` at the latest."""
    first = verdicts[0]
    more = f" (and {counted(len(verdicts) - 1, 'other rank')} of this node)" if len(verdicts) > 1 else ""
    return (
        f"rank {first.rank}{more}: {describe_interval(first)}, longer than its learned timeout of "
        f"{first.timeout_s:.4g} s, but {progress}: extending the timeout, to at most {most_s:.1f} s in total"
    )


def only_waits(verdict: RankHung, why: str) -> str:
    """Format that a rank goes on after its timeout, because another one keeps it waiting."""
    timed = f"{describe_interval(verdict)} (timeout {verdict.timeout_s:.1f} s)"
    return f"rank {verdict.rank}: {timed}, only waits for others and goes on: {why}"


def most_time_is_over(verdict: RankHung, most_s: float) -> str:
    """Format that a rank is ended despite progress: its timeout can't be extended beyond ``most_s``."""
    what = f"{describe_hang(verdict)}{after_iteration(verdict)}"
    return f"{what}: its timeout is extended to at most {most_s:.1f} s, terminating it although ranks make progress"


def calls_no_hooks(ranks: Sequence[int]) -> str:
    """Format that ranks with configured timeouts don't connect to their monitors."""
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(spans(ranks))} have"
    told = "not called setup or init_workload_monitoring"
    return f"timeouts are configured, but {who} {told}: hangs there are not detected"


def sends_no_heartbeats(ranks: Sequence[int]) -> str:
    """Format that heartbeat timeouts don't apply."""
    who = f"rank {ranks[0]} opens" if len(ranks) == 1 else f"ranks {', '.join(spans(ranks))} open"
    send = "sends" if len(ranks) == 1 else "send"
    return f"heartbeat timeouts are configured, but {who} sections and {send} no heartbeat: they do not apply"


def no_collective(review: Reviewed, *, ends: bool) -> str:
    """Format that ranks without hooks complete no collective. ``ends``: the cycle is ended for it."""
    follows = "terminating the ranks" if ends else "reported only, no rank is terminated"
    return f"no collective has completed on any rank for {review.verdict.elapsed_s:.0f} s: {review.text} ({follows})"


def would_be_hang(review: Reviewed, *, observes_only: bool = False) -> str:
    """Format that an interval exceeds a report-only timeout. ``observes_only``: no rank is ever terminated."""
    follows = ": not killed (observe-only)" if observes_only else "; set timeouts or --ft-learn on to restart"
    return f"would be a hang: {review.text}{follows}"


def finished_late(verdict: RankHung) -> str:
    """Format that a rank doesn't exit although all others of the node have finished."""
    return (
        f"{describe_hang(verdict)}: terminating it and treating it as finished, "
        "because the other ranks of this node have finished"
    )
