"""Faults of nodes that ended a cycle, which nodes are bad because of them, and what an operator can do. Pure."""

from __future__ import annotations

import enum
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from megatron_ft.job.rules.messages import Verdict
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.link.base.codec import Fact, Int
from megatron_ft.link.base.rerun import Rerun
from megatron_ft.link.facts.launcher import CauseKind

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
    LINK = "link"
    """Connections between nodes were lost."""
    RANK = "rank"
    """One of its ranks crashed, was killed or hung: the script may be to blame."""


class Fault(Fact, frozen=True, kw_only=True):
    """A cycle was ended by one node, or by the link between several.

    Args:
        node: empty if it was a link.
        nodes: nodes between which connections were lost.
        advanced: the cycle had made progress beyond the earlier ones.
        back: the node was lost, and has been ready for a later cycle.
    """

    node: str
    cycle: Int
    kind: FaultKind
    text: str
    advanced: bool = False
    back: bool = False
    nodes: tuple[str, ...] = ()


def fault_of(verdict: Verdict) -> Fault | None:
    """Return the fault that ended a cycle; None where no node is at fault, or it was only asked to stop."""
    cause, node = verdict.cause, verdict.cause.host
    has_failed = verdict.outcome is Outcome.FAILED
    if cause.hosts and has_failed:
        node, kind = "", FaultKind.LINK
    elif verdict.node is None or not node or cause.follows:
        return None
    elif verdict.outcome is Outcome.MEMBERSHIP:
        kind = FaultKind.LEFT
    elif not has_failed or cause.kind is CauseKind.REQUEST or cause.rerun is Rerun.CONCLUDED:
        return None  # with a re-run that is concluded its rank has repeated what another GPU had computed
    else:
        kind = FaultKind.LOST if cause.kind is CauseKind.MEMBERSHIP else FaultKind.RANK
    return Fault(node=node, cycle=verdict.cycle, kind=kind, text=cause.text[:_LONGEST_TEXT], nodes=cause.hosts)


def bad_nodes(faults: Iterable[Fault]) -> dict[str, str]:
    """Return bad nodes by name, and why: excluded, lost and not back, the place of several failures, or the only one
    that is common to all lost connections of several cycles.

    A rank that fails says little of its node where the job didn't get on: that may be the script. A machine that was
    switched off is as good as before when it is back and fit, unless that happens again.
    """
    found, links = dict[str, str](), list[Fault]()
    texts = defaultdict[tuple[str, FaultKind], list[str]](list)
    for fault in faults:
        node, kind = fault.node, fault.kind
        if kind is FaultKind.LINK:
            links.append(fault)
        elif kind is not FaultKind.RANK or fault.advanced:
            known = texts[node, kind]
            known.append(fault.text)
            told = list(dict.fromkeys(known[-_REPEATS:]))
            if len(known) >= _REPEATS:
                found[node] = f"{len(known)} {'failures' if told[1:] else 'times'}: {'; '.join(told)}"
            elif kind is FaultKind.LEFT or (kind is FaultKind.LOST and not fault.back):
                found[node] = fault.text
    common = set[str]().union(*(fault.nodes for fault in links)).intersection(*(fault.nodes for fault in links))
    if len(links) >= _REPEATS and len(common) == 1:
        found.setdefault(common.pop(), f"{len(links)} times: {links[-1].text}")
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
