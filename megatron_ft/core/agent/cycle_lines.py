"""The launcher's lines about cycles and ranks. Lines about the whole job: job/rules/job_lines.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ft.core.facts.launcher import Cause
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.signal_rules import AGAIN_AFTER_S
from megatron_ft.core.wording import counted, when
from megatron_ft.diagnosis.cycle_cause import describe_overdue
from megatron_ft.diagnosis.hang_messages import Reviewed
from megatron_ft.diagnosis.root_cause import spans
from megatron_ft.diagnosis.waits import RankLag
from megatron_ft.job.rules.restart_policy import Action, Outcome, RestartDecision

_SHOWN = 200


def cycle_started(cycle: int, world_size: int, local_ranks: Sequence[int], nodes: int) -> str:
    """Format the start of a cycle; ``local_ranks`` are this node's global ranks."""
    head = f"cycle {cycle} started: {counted(world_size, 'rank')} on {counted(nodes, 'node')}"
    if nodes == 1:
        return head
    first, last = min(local_ranks), max(local_ranks)
    here = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{head}, {here} here"


def cycle_ended(cycle: int, cause: Cause, decision: RestartDecision, outcome: Outcome, max_restarts: int) -> str:
    """Format the end of a cycle that did not succeed, and what follows."""
    head = f"cycle {cycle} ended: {cause.line}"
    if decision.reason or decision.action is Action.GIVE_UP:
        return f"{head}; {decision.reason}" if decision.reason else head
    head = f"{head}: {decision.change}" if decision.change else head
    follows = f"{head}; restarting as cycle {cycle + 1}"
    if outcome is Outcome.MEMBERSHIP:
        return f"{follows}, no restart used"
    return f"{follows}, {decision.restarts_left} of {counted(max_restarts, 'restart')} left"


def failed_here(cycle: int, text: str) -> str:
    """Format the failure of ranks of this node, if another node's launcher prints why the cycle ended."""
    return f"cycle {cycle}: {text}"


def training_again(cycle: int, seconds: Mapping[str, float]) -> str:
    """Format the first steps of a new cycle. ``seconds``: since the failure was noticed, by phase."""
    parts = ", ".join(f"{name} {duration:.2f}" for name, duration in seconds.items())
    return f"cycle {cycle} is training again {sum(seconds.values()):.2f} s after the failure was detected ({parts})"


def run_finished(cycles: int) -> str:
    return f"all ranks finished after {counted(cycles, 'cycle')}"


def unfit(ended: str, last_line: str, *, retry_s: float) -> str:
    """Format why this node doesn't join. ``ended`` as in "exited with code 3"; ``last_line`` of the check's output."""
    return f"node health check failed: {_failed(ended, last_line)}; retrying in {retry_s:g} s"


def unfit_while_running(ended: str, last_line: str) -> str:
    """Format that a check beside ranks has failed."""
    told = "ranks run on; the node joins no round while it fails"
    return f"node health check failed while ranks run: {_failed(ended, last_line)}; {told}"


def fit_while_running() -> str:
    return "node health check passed again while ranks run"


def _failed(ended: str, last_line: str) -> str:
    shown = last_line if len(last_line) <= _SHOWN else f"{last_line[: _SHOWN - 3]}..."
    return f"{ended} ({shown})" if shown else ended


def fit_again(failures: int) -> str:
    """Format that a node is fit after failed checks."""
    return f"node health check passed after {counted(failures, 'failure')}: joining"


def shut_down_between(text: str) -> str:
    """Format the end of the job on request, while no rank ran here."""
    return f"{text}; the job ends"


def asked_to_stop(*, name: str, ranks: int, timeout_s: float) -> str:
    """Format the first request to stop."""
    if not ranks:
        return f"received {name}"
    return (
        f"received {name}: forwarded to {counted(ranks, 'rank')}, waiting up to {timeout_s:g} s "
        f"(SIGINT or SIGTERM again after {AGAIN_AFTER_S:g} s kills them)"
    )


def abandoned(text: str) -> str:
    """Format why the launcher leaves the job of its own accord."""
    return f"{text}: terminating the ranks of this node and leaving the job"


def killing_at_once(name: str) -> str:
    """Format the second request to stop."""
    return f"received {name} again: killing the ranks"


def stopped(name: str, failed: Sequence[str]) -> str:
    """Format why a cycle ended on request; ``failed``: exits of ranks other than with 0, in words."""
    if not failed:
        return f"stopped by {name}, all ranks exited with 0"
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"stopped by {name}, {failed[0]}{more}"


def observed(verdict: RankHung) -> str:
    """Format a hang with ``--ft-observe-only``."""
    return f"rank {verdict.rank} {describe_overdue(verdict)}{_at(verdict)}: not killed (observe-only)"


def more_time(verdicts: Sequence[RankHung], progress: str, most_s: float) -> str:
    """Format that suspected ranks get more time because of ``progress``, until ``most_s`` at the latest."""
    first = verdicts[0]
    more = f" (and {counted(len(verdicts) - 1, 'other rank')} of this node)" if len(verdicts) > 1 else ""
    where = f"in '{first.section}'" if first.section is not None else first.kind.replace("_", " ")
    return (
        f"rank {first.rank}{more}: {where} for {first.elapsed_s:.1f} s{_at(first)}, longer than its learned timeout of "
        f"{first.timeout_s:.4g} s, but {progress}: extending the timeout, to at most {most_s:.1f} s in total"
    )


def only_waits(verdict: RankHung, why: str) -> str:
    """Format that a rank goes on after its timeout, because another one keeps it waiting."""
    where = f"in '{verdict.section}'" if verdict.section is not None else verdict.kind.replace("_", " ")
    timed = f"for {verdict.elapsed_s:.1f} s{_at(verdict)} (timeout {verdict.timeout_s:.1f} s)"
    return f"rank {verdict.rank}: {where} {timed}, only waits for others and goes on: {why}"


def most_time_is_over(verdict: RankHung, most_s: float) -> str:
    """Format that a rank is ended despite progress: its timeout can't be extended beyond ``most_s``."""
    what = f"rank {verdict.rank} {describe_overdue(verdict)}{_at(verdict)}"
    return f"{what}: its timeout is extended to at most {most_s:.1f} s, terminating it although ranks make progress"


def _at(verdict: RankHung) -> str:
    return "" if verdict.iteration is None else f" {when(verdict.iteration)}"


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


def slow_rank(lag: RankLag) -> str:
    """Format that the other ranks wait for one."""
    return f"{lag.text} (reported only)"


def slow_no_more(rank: int) -> str:
    return f"rank {rank} no longer holds the others back"


def no_collective(review: Reviewed, *, ends: bool) -> str:
    """Format that ranks without hooks complete no collective. ``ends``: the cycle is ended for it."""
    follows = "terminating the ranks" if ends else "reported only, no rank is terminated"
    return f"no collective has completed on any rank for {review.elapsed_s:.0f} s: {review.text} ({follows})"


def would_be_hang(review: Reviewed, *, observes_only: bool = False) -> str:
    """Format that an interval exceeds a report-only timeout. ``observes_only``: no rank is ever terminated."""
    follows = ": not killed (observe-only)" if observes_only else "; set timeouts or --ft-learn on to restart"
    return f"would be a hang: {review.text}{follows}"


def collectives_go_on(seconds: float) -> str:
    """Format the end of a silence reported by ``no_collective``."""
    return f"collectives complete again on this node, after {seconds:.0f} s"


def finished_late(verdict: RankHung) -> str:
    """Format that a rank doesn't exit although all others of the node have finished."""
    return (
        f"rank {verdict.rank} {describe_overdue(verdict)}: terminating it and treating it as finished, "
        "because the other ranks of this node have finished"
    )


def taken_for_lost(why: str) -> tuple[str, str]:
    """Return cause and consequence if the others gave this node up."""
    told = f" ({why})" if why else ""
    return f"the other nodes declared this one lost{told} and continue without it", "on standby"


def job_went_on(text: str) -> str:
    """Format the end of a job in which this launcher's ranks had no part."""
    return f"the job ended without this node: {text or 'the other nodes finished it'}"
