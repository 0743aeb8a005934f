"""Choice of what follows a cycle: the next one, once enough nodes are ready, or the end of the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.decisions import Decision, DecisionKind
from megatron_ft.job.rules.faults import Fault, FaultKind, back_again, bad_nodes, fault_of
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import LeaderPart
from megatron_ft.job.rules.liveness import lost_s
from megatron_ft.job.rules.member import CUT_OFF_S
from megatron_ft.job.rules.messages import NodePhase
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import choose, usable
from megatron_ft.job.rules.restart_policy import NodeState, Outcome, Rotation, Rules, furthest, rotated
from megatron_ft.link.base.codec import NO_PARTS
from megatron_ft.link.base.wording import listed

_FIRST_CALL_S = 30.0
_LAST_CALL_S = 1.0


class Plan(NamedTuple):
    """The next decision, which the leader numbers. ``members``: nodes with a place in it, by place."""

    decision: Decision
    members: Sequence[Node]


class JobEnd(NamedTuple):
    """The job is to end, with this exit code."""

    code: int
    text: str


class Round(NamedTuple):
    """Nodes meet for a cycle.

    Args:
        ready: those that would take part.
        enough: number of them that can: with ``--ft-segment`` those in whole segments.
        awaits: nodes of the last cycle are alive and not ready yet.
        until_s: when they wait no longer: for MIN nodes, for those of the last cycle, or for more.
    """

    ready: list[Node]
    enough: int
    awaits: bool
    until_s: float


class NextCycle:
    """One leader's. Times are seconds of the leader's clock.

    Args:
        nodes: all launchers that were ever here or expected, by instance.
    """

    def __init__(self, rules: Rules, nodes: Mapping[str, Node], parts: Sequence[LeaderPart]) -> None:
        self.alarm_s = math.inf
        """When to call ``due`` again, at the latest."""
        self._rules, self._nodes, self._parts = rules, nodes, parts
        self._few_s: float | None = None
        """Since when there are fewer than MIN; None: there are as many."""
        self._enough_s: float | None = None
        """Since when there have first been MIN in this round, and none awaited."""
        self._faults: dict[int, Fault] = {}
        """Faults that have ended cycles, by cycle; not those from before this leader took over."""
        self._slots: Sequence[Node] = []
        """The nodes that have or last had each place: an empty place is kept for a launcher that comes back."""
        self._next_slots: Sequence[Node] = []
        self._took_over_s = math.inf
        """Since when it leads a job that another leader led before, whose launchers it needn't all have met."""

    def cycle_began(self) -> None:
        """The cycle that was planned last has begun."""
        self._few_s, self._enough_s, self._slots = None, None, self._next_slots

    def took_over(self, slots: Sequence[Node], now_s: float) -> None:
        """Lead on a job in whose last cycle, that another leader has begun, these nodes have the places."""
        self._took_over_s, self._slots = now_s, slots

    def due(self, cycle: JobCycle | None, now_s: float) -> Plan | JobEnd | Round | None:
        """Return the decision to make, or the nodes that meet; None while a cycle runs or is judged."""
        self.alarm_s, rules = math.inf, self._rules
        if cycle is not None and cycle.outcome is None:
            return None
        now = self.meet(cycle, now_s)
        if cycle is not None and not cycle.restarts:
            if cycle.verdict is None or now.awaits:
                return None
            if cycle.shutdown and cycle.outcome is not Outcome.SUCCEEDED:  # a request after that comes too late
                place, text = cycle.shutdown
                if place is not None and len(cycle.seats) > 1:
                    text = job_lines.at(place, cycle.seats[place].node.name, text)
                return JobEnd(1, text)
            return JobEnd(cycle.verdict.code, cycle.verdict.cause_for(None).text)
        more, self.alarm_s = rules.min_nodes - now.enough, now.until_s
        is_over = now_s >= self.alarm_s
        if more <= 0:
            return self._start_cycle(cycle, now.ready) if is_over else now
        if rules.launchers:
            left_s = [at_s for at_s in self._may_come_until_s() if at_s > now_s]
            if len(left_s) < rules.min_nodes:
                lost = [node.name for node in self._nodes.values() if node.name and node.is_gone]
                few = job_lines.too_few_left(left=left_s.count(math.inf), min_nodes=rules.min_nodes)
                text = f"{few}; lost launchers are not restarted{f': {listed(lost)}' if lost else ''}"
                return JobEnd(TRY_AGAIN_CODE, text)
            self.alarm_s = min(self.alarm_s, *left_s)
        if is_over:
            aside = sum(node.phase is NodePhase.ASIDE and not node.is_gone for node in self._nodes.values())
            return JobEnd(TRY_AGAIN_CODE, job_lines.did_not_come(more, seconds=rules.join_timeout_s, aside=aside))
        return now

    def meet(self, cycle: JobCycle | None, now_s: float) -> Round:
        """Take note of the nodes that meet after ``cycle``: they begin the next one, if enough wait no longer."""
        rules, nodes = self._rules, self._nodes.values()
        ready = [node for node in nodes if node.is_ready]
        enough, awaits = usable(ready, rules.segment), any(node.is_awaited for node in nodes)
        if enough < rules.min_nodes:
            self._few_s = now_s if self._few_s is None else self._few_s
            return Round(ready, enough, awaits, self._few_s + rules.join_timeout_s)
        self._few_s = None
        if awaits:
            return Round(ready, enough, awaits, math.inf)
        self._enough_s = now_s if self._enough_s is None else self._enough_s
        # after nodes left or joined more may come
        is_as_large = cycle is not None and cycle.decision.world <= enough and cycle.outcome is not Outcome.MEMBERSHIP
        last_call_s = _FIRST_CALL_S if cycle is None else 0.0 if is_as_large else _LAST_CALL_S
        if rules.last_call_s is not None:
            last_call_s = rules.last_call_s
        return Round(ready, enough, awaits, now_s if enough >= rules.max_nodes else self._enough_s + last_call_s)

    def _may_come_until_s(self) -> list[float]:
        """Return until when each launcher may take part, as far as is known: those here, lost, and yet to come.

        One that is cut off gives up after a while. Until then it may be back.
        """
        back_s = max(lost_s(len(self._nodes)), CUT_OFF_S) + 5.0
        fit = [node for node in self._nodes.values() if not node.is_excluded]
        here_s = [math.inf for node in fit if not node.is_gone]
        gone_s = [node.gone_s + back_s for node in fit if node.is_gone and node.silent]
        return [*here_s, *gone_s, *[self._took_over_s + back_s] * (self._rules.launchers - len(self._nodes))]

    def nodes_left(self, cycle: JobCycle | None) -> int:
        """Return how many nodes could take part in another cycle, as far as is known, if no lost one is back."""
        excluded = [seat.node for seat in cycle.seats if seat.state is NodeState.EXCLUDED] if cycle is not None else []
        here = [node for node in self._nodes.values() if not (node.is_gone or node.is_excluded or node in excluded)]
        # one that hasn't come by the second cycle doesn't come any more
        is_late = self._took_over_s < math.inf or (cycle is not None and cycle.decision.cycle > 0)
        return len(here) + (0 if is_late else max(0, self._rules.launchers - len(self._nodes)))

    def _start_cycle(self, cycle: JobCycle | None, ready: list[Node]) -> Plan:
        rules, rotation, named = self._rules, Rotation.NONE, ""
        number, used, shift, advance = 0, 0, 0, furthest(node.hello.before for node in ready)
        if cycle is not None and cycle.verdict is not None:
            last, verdict, advance = cycle.decision, cycle.verdict, cycle.advance
            number, rotation = last.cycle + 1, verdict.rotation
            used, shift = last.restarts + (cycle.outcome is Outcome.FAILED), last.shift + (rotation is Rotation.RANKS)
            if (fault := fault_of(verdict)) is not None:
                self._faults[last.cycle] = replace(fault, advanced=advance.last > last.advance.last)
                # the node that reports a hang is often only waiting
                seats = cycle.seats if verdict.node is None else [cycle.seats[verdict.node], *cycle.seats]
                named = next((seat.node.instance for seat in seats if seat.node.name == fault.node), "")
        faults = back_again(self._faults.values(), {node.name for node in ready})
        names, lost = bad_nodes(faults), {fault.node for fault in faults if fault.kind is FaultKind.LOST}
        bad = {node.instance for node in ready if node.hello.bad or node.name in names}
        chosen, slots = choose(self._slots, ready, rules.max_nodes, rules.segment, bad=bad, named=named)
        takes_part = set(chosen)
        if rotation is Rotation.NODES:
            chosen = rotated(chosen, within=rules.segment)
            order = iter(chosen)
            slots = [next(order) if slot in takes_part else slot for slot in slots]
        self._next_slots = slots
        spares = [node for node in ready if node not in takes_part]
        decision = Decision(
            -1,
            "",
            DecisionKind.START,
            cycle=number,
            world=len(chosen),
            restarts=used,
            advance=advance,
            back=tuple(sorted({node.name for node in ready if node.hello.bad or node.name in lost})),
            shift=shift,
            attachments=NO_PARTS.updated(*(each for part in self._parts for each in part.attachment(chosen, spares))),
        )
        return Plan(decision, chosen)
