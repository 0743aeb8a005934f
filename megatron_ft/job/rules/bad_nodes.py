"""Bad nodes, those that ended cycles in this life of the job or in earlier ones: the last to get places. Pure."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_ft.job.rules.faults import Fault, FaultKind, back_again, bad_nodes, fault_of
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.nodes import Node


class BadNodeTracker:
    """Bad nodes. A coordinator that takes over only knows what launchers report, and what happens then."""

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._told: set[str] = set()
        """Names of nodes whose return was reported."""

    def record_verdict(self, cycle: JobCycle) -> None:
        """Record the verdict on a cycle that has ended."""
        fault = None if cycle.verdict is None else fault_of(cycle.verdict)
        if fault is not None:
            advanced = cycle.advance.last > cycle.decision.advance.last
            more = replace(fault, advanced=advanced)
            self._faults = (*self._faults, more)
            self._told.discard(fault.node)

    def bad_among(self, nodes: Collection[Node]) -> frozenset[str]:
        """Return the instances of bad nodes among these."""
        names = bad_nodes(self._faults)
        return frozenset(node.instance for node in nodes if node.bad or node.name in names)

    def blamed_instance(self, cycle: JobCycle | None) -> str:
        """Return the instance of the launcher whose node ended that cycle; empty if no node did."""
        verdict = None if cycle is None else cycle.verdict
        fault = None if verdict is None else fault_of(verdict)
        if cycle is None or verdict is None or verdict.node is None or fault is None or not fault.node:
            return ""
        seat = cycle.seats[verdict.node]
        others = [each for each in cycle.seats if each.name == verdict.cause.host]
        return (seat if seat.name == verdict.cause.host or not others else others[0]).instance

    def take_returned(self, nodes: Collection[Node]) -> tuple[str, ...]:
        """Return the names of nodes that were lost or bad before and are ready again, each once."""
        lost = {fault.node for fault in self._faults if fault.kind is FaultKind.LOST and not fault.back}
        here = {node.name for node in nodes if node.bad or node.name in lost} - self._told
        self._told |= here
        self._faults = back_again(self._faults, here)
        return tuple(sorted(here))
