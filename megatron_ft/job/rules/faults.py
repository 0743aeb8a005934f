"""Faults of nodes that ended a cycle, which nodes are bad because of them, and what an operator can do. Pure."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.messages import Verdict
from megatron_ft.job.rules.nodes import Node
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


class BadNodeTracker:
    """Bad nodes in this life of the job or in earlier ones: the last to get places.

    A leader that takes over only knows what launchers report, and what happens then.
    """

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._told: set[str] = set()
        """Names of nodes whose return was reported."""

    def record_verdict(self, cycle: JobCycle) -> None:
        """Record the verdict on a cycle that has ended."""
        fault = None if cycle.verdict is None else fault_of(cycle.verdict)
        if fault is not None:
            advanced = cycle.advance.last > cycle.decision.advance.last
            self._faults = (*self._faults, replace(fault, advanced=advanced))
            self._told.discard(fault.node)

    def bad_among(self, nodes: Collection[Node]) -> frozenset[str]:
        """Return the instances of bad nodes among these."""
        names = bad_nodes(self._faults)
        return frozenset(node.instance for node in nodes if node.hello.bad or node.name in names)

    def blamed_instance(self, cycle: JobCycle | None) -> str:
        """Return the instance of the launcher whose node ended that cycle; empty if no node did."""
        verdict = None if cycle is None else cycle.verdict
        fault = None if verdict is None else fault_of(verdict)
        if cycle is None or verdict is None or verdict.node is None or fault is None or not fault.node:
            return ""
        seats = [cycle.seats[verdict.node], *cycle.seats]  # the node that reports a hang is often only waiting
        return next((seat for seat in seats if seat.name == fault.node), seats[0]).node.instance

    def take_returned(self, nodes: Collection[Node]) -> tuple[str, ...]:
        """Return the names of nodes that were lost or bad before and are ready again, each once."""
        lost = {fault.node for fault in self._faults if fault.kind is FaultKind.LOST and not fault.back}
        here = {node.name for node in nodes if node.hello.bad or node.name in lost} - self._told
        self._told |= here
        self._faults = back_again(self._faults, here)
        return tuple(sorted(here))
