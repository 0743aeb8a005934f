"""The launcher's lines about cycles. Lines about the whole job: job/rules/job_lines.py; hangs: diagnosis. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.job.rules.restart_policy import Action, Outcome, RestartDecision
from megatron_ft.link.base.signal_rules import AGAIN_AFTER_S
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.launcher import Cause


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


def asked_to_stop(*, name: str, ranks: int, timeout_s: float) -> str:
    """Format the first request to stop."""
    if not ranks:
        return f"received {name}"
    return (
        f"received {name}: forwarded to {counted(ranks, 'rank')}, waiting up to {timeout_s:g} s "
        f"(SIGINT or SIGTERM again after {AGAIN_AFTER_S:g} s kills them)"
    )


def stopped(name: str, failed: Sequence[str]) -> str:
    """Format why a cycle ended on request; ``failed``: exits of ranks other than with 0, in words."""
    if not failed:
        return f"stopped by {name}, all ranks exited with 0"
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"stopped by {name}, {failed[0]}{more}"


def taken_for_lost(why: str) -> str:
    """Format why a cycle ended here if the others gave this node up."""
    return f"the other nodes declared this one lost{f' ({why})' if why else ''} and continue without it"


def job_went_on(text: str) -> str:
    """Format the end of a job in which this launcher's ranks had no part."""
    return f"the job ended without this node: {text or 'the other nodes finished it'}"
