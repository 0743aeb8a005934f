"""Faults of nodes that ended a cycle, which nodes are bad because of them, and what an operator can do. Pure."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from megatron_ft.core.codec import Fact, Int
from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.core.job.messages import Verdict
from megatron_ft.core.job.restart_policy import Outcome
from megatron_ft.core.rerun import Rerun

_LONGEST_TEXT = 500
_LONGEST_REASON = 100
_REPEATS = 2
"""Failures of one kind after which a node is bad."""


class FaultKind(enum.Enum):
    """Way in which a node ended a cycle."""

    LOST = "lost"
    """Its launcher or its host was lost."""
    LEFT = "left"
    """The node was excluded, or couldn't end its ranks."""
    RANK = "rank"
    """One of its ranks crashed, was killed or hung: the script may be to blame."""


class Fault(Fact, frozen=True, kw_only=True):
    """A cycle was ended by one node.

    Args:
        advanced: the cycle had made progress beyond the earlier ones.
        back: the node was lost, and has been ready for a later cycle.
    """

    node: str
    cycle: Int
    kind: FaultKind
    text: str
    advanced: bool = False
    back: bool = False


def fault_of(verdict: Verdict) -> Fault | None:
    """Return the fault of the node that ended a cycle; None where no node did, or it was only asked to stop."""
    if verdict.node is None or not verdict.cause.host:
        return None
    if verdict.outcome is Outcome.MEMBERSHIP:
        kind = FaultKind.LEFT
    elif verdict.outcome is not Outcome.FAILED or verdict.cause.kind is CauseKind.REQUEST:
        return None
    elif verdict.cause.rerun is Rerun.CONCLUDED:
        return None  # its rank has re-run what another GPU had computed
    else:
        kind = FaultKind.LOST if verdict.cause.kind is CauseKind.MEMBERSHIP else FaultKind.RANK
    return Fault(node=verdict.cause.host, cycle=verdict.cycle, kind=kind, text=verdict.cause.text[:_LONGEST_TEXT])


def bad_nodes(faults: Iterable[Fault]) -> dict[str, str]:
    """Return bad nodes by name, and why: excluded, lost and not back, or the place of several failures.

    A rank that fails says little of its node where the job didn't get on: that may be the script. A machine that was
    switched off is as good as before when it is back and fit, unless that happens again.
    """
    found: dict[str, str] = {}
    texts: dict[tuple[str, FaultKind], list[str]] = {}
    for fault in faults:
        node, kind = fault.node, fault.kind
        if kind is FaultKind.RANK and not fault.advanced:
            continue
        known = texts.setdefault((node, kind), [])
        known.append(fault.text)
        count, told = len(known), list(dict.fromkeys(known[-_REPEATS:]))
        if kind is FaultKind.LEFT or (kind is FaultKind.LOST and not fault.back and count < _REPEATS):
            found[node] = fault.text
        elif count >= _REPEATS:
            text = f"{count} {'failures' if told[1:] else 'times'}: {'; '.join(told)}"
            found[node] = text if kind is FaultKind.LOST else found.get(node, text)
    return found


def back_again(faults: Iterable[Fault], names: Collection[str]) -> tuple[Fault, ...]:
    """Return the faults, with these nodes marked as ready again."""
    return tuple(
        replace(fault, back=True) if fault.kind is FaultKind.LOST and fault.node in names else fault for fault in faults
    )


def advice(scheduler: str, node: str, reason: str) -> str:
    """Return a line about a bad node, with commands to keep jobs from it: they are printed, never run.

    ``scheduler`` is "slurm", "kubernetes" or another. In a pod, ``node`` is its name.
    """
    told = f"bad node {node}: {reason}"
    if scheduler == "slurm":
        drain = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason[:_LONGEST_REASON]}"]
        return f"{told}. To drain it: {shlex.join(drain)}; to do without it: sbatch --exclude={node}"
    if scheduler == "kubernetes":
        where = f"kubectl get pod {shlex.quote(node)} -o 'jsonpath={{.spec.nodeName}}'"
        return f'{told}. To keep pods from its machine: kubectl cordon "$({where})"'
    return told
