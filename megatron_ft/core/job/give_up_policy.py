"""How long a launcher waits for a coordinator, and with which exit code it gives up. Pure."""

from __future__ import annotations

from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.job import actions, job_lines
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import AcceptorState, Decision, DecisionKind
from megatron_ft.core.job.restart_policy import Action

GIVE_UP_S = 60.0
"""Seconds without a coordinator after which a node that was part of the job leaves it."""
_REPORT_UNREACHED_S = (10.0, 60.0)
"""Seconds after which a launcher that no coordinator leads tells the user why: in a job of few nodes or on the first
two, and on the others, which may be thousands with the same thing to tell."""
_FEW_NODES = 16


def is_new(memory: AcceptorState, standing: m.NodeStatus) -> bool:
    """Whether this launcher has had no part in a decision of the job yet."""
    return memory.is_empty and standing.phase is not m.NodePhase.EXCLUDED


def patience_s(identity: m.Identity, memory: AcceptorState, standing: m.NodeStatus) -> float:
    """How many seconds to wait for a coordinator."""
    join_s = identity.rules.join_timeout_s
    return join_s if is_new(memory, standing) else min(join_s, GIVE_UP_S)


def report_unreached_s(identity: m.Identity) -> float:
    """After how many seconds without a coordinator to tell the user ``unreached``."""
    is_soon = identity.rules.max_nodes <= _FEW_NODES or identity.rank in (0, 1)
    return _REPORT_UNREACHED_S[not is_soon]


def unreached(identity: m.Identity, problems: str) -> str:
    """While one is looked for. ``problems``: why it wasn't reached at which address."""
    return f"no coordinator reached ({problems}); trying for {_join_timeout(identity)}"


def give_up(
    identity: m.Identity, memory: AcceptorState, standing: m.NodeStatus, problems: str, *, is_unowned: bool
) -> actions.Leave:
    """Return the end of a launcher whose time is over.

    ``problems``: why no coordinator was reached at which address. ``is_unowned``: no process was ever reached at the
    first endpoint. With a host that no scheduler has named that is a mistake: it would be the same at another start.
    """
    accepted, verdict = memory.accepted, standing.verdict
    if accepted is not None and accepted.held.decision.kind is DecisionKind.END:
        return actions.Leave(accepted.held.decision.code, accepted.held.decision.text)
    if verdict is not None and verdict.decision.action is not Action.RESTART:
        return actions.Leave(verdict.code, verdict.cause.text)
    if standing.phase is m.NodePhase.EXCLUDED:
        # the other nodes may still train, and a scheduler may end their job at any other code
        return actions.Leave(0, "no coordinator is reachable any more")
    text = "no coordinator reachable that can continue the job: start the job again"
    if is_new(memory, standing):
        if is_unowned and not identity.has_known_host:
            text = job_lines.nobody_owns(identity.endpoints[0], _join_timeout(identity), problems)
            return actions.Leave(MISTAKE_CODE, text)
        text = f"no coordinator reached for {_join_timeout(identity)} ({problems})"
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
