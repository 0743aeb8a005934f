"""Admission to a job: launchers of that very job, with the options of the first one. Pure.

Those that were started after its end are to wait for the leader of the next one.
"""

from __future__ import annotations

from msgspec.structs import asdict

from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.messages import Dismiss, Hello, JobDefinition
from megatron_ft.link.base.wording import printable

_NAMES = {
    "min_nodes": "MIN of --nnodes",
    "max_nodes": "MAX of --nnodes",
    "min_healthy": "--restart-policy min-healthy",
    "max_restarts": "--max-restarts",
    "max_stalled": "--ft-max-no-progress-cycles",
    "at_once": "--ft-scale-up-at-once",
    "last_call_s": "--rdzv-conf last_call_timeout",
    "join_timeout_s": "--rdzv-conf join_timeout",
    "launchers": "the number of launchers that srun has started",
    "segment": "--ft-segment",
    "node_lost_s": "--ft-node-lost-timeout",
}
"""Each of the rules, as users know it."""


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
    if hello.rules == defined.rules:
        return None
    own, all_ = asdict(hello.rules), asdict(defined.rules)
    told = [f"{_NAMES[of]} is {own[of]} on this node, {all_[of]} on the others" for of in own if own[of] != all_[of]]
    return Dismiss(MISTAKE_CODE, f"this launcher's options differ from those of the others: {'; '.join(told)}")
