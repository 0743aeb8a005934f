"""Faults of nodes that ended a cycle, which nodes are bad because of them, and what an operator can do. Pure."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from megatron_ft.core.codec import Fact, Int
from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.core.rerun import Rerun
from megatron_ft.job.rules.messages import Verdict
from megatron_ft.job.rules.restart_policy import Outcome

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
    cause = verdict.cause
    if cause.hosts and verdict.outcome is Outcome.FAILED:
        text = cause.text[:_LONGEST_TEXT]
        return Fault(node="", cycle=verdict.cycle, kind=FaultKind.LINK, text=text, nodes=cause.hosts)
    if verdict.node is None or not cause.host or cause.follows:
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
    """Return bad nodes by name, and why: excluded, lost and not back, the place of several failures, or the only one
    that is common to all lost connections of several cycles.

    A rank that fails says little of its node where the job didn't get on: that may be the script. A machine that was
    switched off is as good as before when it is back and fit, unless that happens again.
    """
    faults, found = [*faults], dict[str, str]()
    links = [fault for fault in faults if fault.kind is FaultKind.LINK]
    common = set[str]().union(*(fault.nodes for fault in links)).intersection(*(fault.nodes for fault in links))
    if len(links) >= _REPEATS and len(common) == 1:
        found[common.pop()] = f"{len(links)} times: {links[-1].text}"
    texts: dict[tuple[str, FaultKind], list[str]] = {}
    for fault in faults:
        node, kind = fault.node, fault.kind
        if kind is FaultKind.LINK or (kind is FaultKind.RANK and not fault.advanced):
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
