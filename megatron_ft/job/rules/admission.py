"""Admission to a job: launchers of that very job, with the options of the first one. Pure.

Those that were started after its end are to wait for the leader of the next one.
"""

from __future__ import annotations

from megatron_ft.config.launcher_options import ANY_FAILED, LAUNCHER_OPTIONS, MIN_HEALTHY
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.messages import Dismiss, Hello, JobDefinition
from megatron_ft.job.rules.restart_policy import Rules
from megatron_ft.link.base.wording import printable


def is_of_next(hello: Hello, defined: JobDefinition, since_end_s: float, end_revision: int = 0) -> bool:
    """Whether a launcher was started after the job's end, by a user who starts the job again under the same name.

    Where a scheduler's word for this life is in the name, it belongs to this one: srun may be slow to start a
    launcher, and Kubernetes starts a pod again.

    ``end_revision``: of etcd's store, if an earlier leader has ended the job.
    """
    is_later = hello.since >= end_revision if end_revision else hello.up_s < since_end_s
    return hello.is_fresh and (hello.job != defined.job or (not hello.names_life and is_later))


def knows(hello: Hello, former: DecisionRecord) -> bool:
    """Return True if a launcher is of the run of the job that has made the last decision in etcd."""
    last = former.decision
    if hello.decided is not None:
        return hello.decided.decision.founding == last.founding
    was_here = last.kind is DecisionKind.END and hello.since < former.revision
    return hello.names_life or was_here or not hello.is_fresh


def refusal(hello: Hello, defined: JobDefinition) -> Dismiss | None:
    """Return the answer to a launcher of another job, or with other options; None if it is let in."""
    if hello.job != defined.job:
        text = (
            f"another job already uses this rendezvous endpoint ({printable(defined.job)}; this launcher's job is "
            f"{printable(hello.job)}): give each job its own --rdzv-endpoint, or all launchers of one job the same "
            "--rdzv-id"
        )
        return Dismiss(MISTAKE_CODE, text)
    if hello.rules != defined.rules:
        others = _options(defined.rules)
        told = "; ".join(
            f"{option} is {own} on this node, {others[option]} on the others"
            for option, own in _options(hello.rules).items()
            if own != others[option]
        )
        return Dismiss(MISTAKE_CODE, f"this launcher's options differ from those of the others: {told}")
    return None


def _options(rules: Rules) -> dict[str, str]:
    """All that the rules say, as users write it."""
    ours = {field: each.spellings[0] for field, each in LAUNCHER_OPTIONS.items()}
    last_call = "not set" if rules.last_call_s is None else f"{rules.last_call_s:g}"
    return {
        "--nnodes": f"{rules.min_nodes}:{rules.max_nodes}",
        ours["restart_policy"]: MIN_HEALTHY if rules.min_healthy else ANY_FAILED,
        "--max-restarts": str(rules.max_restarts),
        ours["max_no_progress_cycles"]: str(rules.max_stalled),
        ours["scale_up_at_once"]: "set" if rules.at_once else "not set",
        "--rdzv-conf last_call_timeout": last_call,
        "--rdzv-conf join_timeout": f"{rules.join_timeout_s:g}",
        ours["segment"]: str(rules.segment),
        ours["node_lost_timeout"]: f"{rules.node_lost_s:g}",
        "the number of launchers that srun has started": str(rules.launchers),
    }
