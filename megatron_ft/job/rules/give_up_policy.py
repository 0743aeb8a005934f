"""How long a launcher waits for a leader, and with which exit code it gives up. Pure."""

from __future__ import annotations

from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules import actions, job_lines
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision
from megatron_ft.job.rules.restart_policy import Action

HOLDER_STAYS_S = 60.0
"""Seconds for which the launcher that holds the lock stays so that all others hear of the job's end."""
_REPORT_UNREACHED_S = (10.0, 60.0)
"""Seconds after which a launcher that no leader has admitted tells the user why: in a job of few nodes or on the first
two, and on the others, which may be thousands with the same thing to tell."""
_FEW_NODES = 16


def is_new(decided: Assignment | None, standing: m.NodeStatus) -> bool:
    """Whether this launcher has had no part in a decision of the job yet."""
    return decided is None and standing.phase is not m.NodePhase.EXCLUDED


def patience_s(identity: m.Identity, *, is_new: bool, cut_off_s: float) -> float:
    """How many seconds to look for a leader.

    Where the scheduler starts no single launcher again, a leader that is lost with its host doesn't come back: the job
    is to be started again as soon as the ranks have ended. With etcd another launcher leads.
    """
    is_lost = identity.rules.launchers > 0 and not is_new and not identity.is_in_etcd
    return cut_off_s if is_lost else identity.rules.join_timeout_s


def report_unreached_s(identity: m.Identity) -> float:
    """After how many seconds without a leader to tell the user ``unreached``."""
    is_soon = identity.rules.max_nodes <= _FEW_NODES or identity.rank in (0, 1)
    return _REPORT_UNREACHED_S[not is_soon]


def unreached(identity: m.Identity, problem: str) -> str:
    """While one is looked for. ``problem``: why it wasn't reached."""
    return f"no coordinator reached ({identity.endpoint}: {problem}); trying for {_join_timeout(identity)}"


def give_up(
    identity: m.Identity, decided: Assignment | None, standing: m.NodeStatus, problem: str, *, is_unowned: bool
) -> actions.Leave:
    """Return the end of a launcher whose time is over.

    ``problem``: why no leader was reached. ``is_unowned``: no process was ever reached at the endpoint. With a host
    that no scheduler has named that is a mistake: it would be the same at another start.
    """
    verdict = standing.verdict
    if verdict is not None and verdict.decision.action is not Action.RESTART:
        return actions.Leave(verdict.code, verdict.cause.text)
    if standing.phase is m.NodePhase.EXCLUDED:
        # the other nodes may still train, and a scheduler may end their job at any other code
        return actions.Leave(0, "no coordinator is reachable any more")
    problem = f"{identity.endpoint}: {problem}"
    text = f"no coordinator reachable that can continue the job ({problem}): start the job again"
    if is_new(decided, standing):
        if is_unowned and not identity.has_known_host:
            text = job_lines.nobody_owns(identity.endpoint, _join_timeout(identity), problem)
            return actions.Leave(MISTAKE_CODE, text)
        text = f"no coordinator reached for {_join_timeout(identity)} ({problem})"
    return actions.Leave(identity.rules.try_again_code, text)


def at_end(identity: m.Identity, decision: Decision, standing: m.NodeStatus) -> actions.Leave:
    """How to leave when the end of the job was decided.

    A launcher that never trained mustn't say that its job has finished if that may have been another one.
    """
    has_part = standing.cycle >= 0 or standing.phase is m.NodePhase.EXCLUDED
    if decision.code == 0 and decision.world and not (has_part or identity.is_named):
        return actions.Leave(MISTAKE_CODE, job_lines.not_proven(identity.job))
    return actions.Leave(decision.code, decision.text, is_of_all=True)


def _join_timeout(identity: m.Identity) -> str:
    return f"{identity.rules.join_timeout_s:g} s (--rdzv-conf join_timeout)"
