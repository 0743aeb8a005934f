"""Choice of what follows a cycle: the next one, once enough nodes are ready, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.decisions import Decision, DecisionKind
from megatron_ft.job.rules.faults import BadNodeTracker
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import LeaderPart
from megatron_ft.job.rules.liveness import lost_s
from megatron_ft.job.rules.member import CUT_OFF_S
from megatron_ft.job.rules.messages import NodePhase
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import choose, rotated_slots, usable
from megatron_ft.job.rules.restart_policy import NodeState, Outcome, Rotation, Rules, furthest, rotated
from megatron_ft.link.base.codec import Parts
from megatron_ft.link.base.times import earliest
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


def last_call_s(rules: Rules, *, is_first: bool) -> float:
    """Return the seconds a round stays open for more nodes once there are enough; ``is_first``: the first round."""
    if rules.last_call_s is not None:
        return rules.last_call_s
    return _FIRST_CALL_S if is_first else _LAST_CALL_S


@dataclass(slots=True)
class RoundCompletion:
    """When the nodes that are ready begin a cycle, and when they wait for more: one for each round.

    Args:
        alarm_s: when to ask again at the latest.
        waits_s: since when there have been too few.
    """

    alarm_s: float | None = None
    waits_s: float | None = None
    _enough_s: float | None = None
    """When there were enough in this round for the first time, and none was awaited."""

    def update(self, rules: Rules, *, ready: int, awaited: bool, last: int, patient: bool, now_s: float) -> bool:
        """Take note of how the nodes are now; return True if those that are ready begin a cycle.

        Args:
            awaited: nodes of the last cycle are alive and not ready yet.
            last: number of nodes of the last cycle; 0: there was none.
            patient: it ended because nodes left or joined, so more may come.
        """
        self.alarm_s = None
        if ready < rules.min_nodes:
            self.waits_s = now_s if self.waits_s is None else self.waits_s
            self.alarm_s = self.waits_s + rules.join_timeout_s
            return False
        self.waits_s = None
        if awaited:
            return False
        self._enough_s = now_s if self._enough_s is None else self._enough_s
        if ready >= rules.max_nodes or (0 < last <= ready and rules.last_call_s is None and not patient):
            return True
        self.alarm_s = self._enough_s + last_call_s(rules, is_first=last == 0)
        return now_s >= self.alarm_s


class NextCycle:
    """One leader's. Times are seconds of the leader's clock.

    Args:
        nodes: all launchers that were ever here or expected, by instance.
    """

    def __init__(self, rules: Rules, nodes: Mapping[str, Node], parts: Sequence[LeaderPart]) -> None:
        self.alarm_s: float | None = None
        """When to call ``due`` again, at the latest."""
        self.bad_nodes = BadNodeTracker()
        self._rules, self._nodes, self._parts = rules, nodes, parts
        self._completion = RoundCompletion()
        self._slots: Sequence[Node] = []
        """The nodes that have or last had each place: an empty place is kept for a launcher that comes back."""
        self._next_slots: Sequence[Node] = []
        self._took_over_s: float | None = None
        """Since when it leads a job that another leader led before, whose launchers it needn't all have met."""

    def cycle_began(self) -> None:
        """The cycle that was planned last has begun."""
        self._completion, self._slots = RoundCompletion(), self._next_slots

    def took_over(self, slots: Sequence[Node], now_s: float) -> None:
        """Lead on a job in whose last cycle, that another leader has begun, these nodes have the places."""
        self._took_over_s, self._slots = now_s, slots

    def due(self, cycle: JobCycle | None, now_s: float) -> Plan | JobEnd | None:
        """Return the decision to make, if one is due."""
        self.alarm_s, rules = None, self._rules
        if cycle is not None and cycle.outcome is None:
            return None
        if cycle is not None and not cycle.restarts:
            if cycle.verdict is None or self._awaits:
                return None
            if cycle.shutdown and cycle.outcome is not Outcome.SUCCEEDED:  # a request after that comes too late
                place, text = cycle.shutdown
                if place is not None and len(cycle.seats) > 1:
                    text = job_lines.on(place, cycle.seats[place].name, text)
                return JobEnd(1, text)
            return JobEnd(cycle.verdict.code, cycle.verdict.cause_for(None).text)
        if self._is_complete(cycle, now_s):
            return self._start_cycle(cycle, self._ready)
        if too_few := self._too_few_for_ever(now_s):
            return JobEnd(TRY_AGAIN_CODE, too_few)
        if self._completion.waits_s is not None and now_s >= self._completion.waits_s + rules.join_timeout_s:
            more = rules.min_nodes - usable(self._ready, rules.segment)
            aside = sum(node.phase is NodePhase.ASIDE and not node.is_gone for node in self._nodes.values())
            text = job_lines.did_not_come(more, seconds=rules.join_timeout_s, aside=aside)
            return JobEnd(TRY_AGAIN_CODE, text)
        return None

    def meet(self, now_s: float) -> bool:
        """Note that nodes meet for the first cycle, which can't be decided yet; return True if there are enough."""
        self._is_complete(None, now_s)
        return self._completion.waits_s is None

    @property
    def _ready(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.is_ready]

    @property
    def _awaits(self) -> bool:
        return any(node.is_awaited for node in self._nodes.values())

    def _is_complete(self, cycle: JobCycle | None, now_s: float) -> bool:
        # thousands meet: as long as they are too few, whether they are ready or not, none of them is looked at
        ready = self._ready if len(self._nodes) >= self._rules.min_nodes else []
        complete = self._completion.update(
            self._rules,
            ready=usable(ready, self._rules.segment),
            awaited=bool(ready) and self._awaits,
            last=0 if cycle is None else cycle.decision.world,
            patient=cycle is not None and cycle.outcome is Outcome.MEMBERSHIP,
            now_s=now_s,
        )
        self.alarm_s = self._completion.alarm_s
        return complete

    def _too_few_for_ever(self, now_s: float) -> str:
        """Return why too few nodes are left, where lost launchers aren't started again; empty if enough are left.

        A launcher that is cut off gives up after a while. Until then it may be back.
        """
        rules = self._rules
        if not rules.launchers:
            return ""
        back_s = max(lost_s(len(self._nodes)), CUT_OFF_S) + 5.0
        known = [node for node in self._nodes.values() if node.arrived or node.name]  # others are places only
        gone = [node for node in known if node.is_excluded or node.is_gone]
        until_s = [node.gone_s + back_s for node in gone if node.silent and not node.is_excluded]
        unmet = 0
        if self._took_over_s is not None:
            unmet = max(0, rules.launchers - len(known))
            until_s += [self._took_over_s + back_s] * unmet
        left = rules.launchers - len(gone) - unmet
        later_s = [at_s for at_s in until_s if at_s > now_s]
        if left + len(later_s) < rules.min_nodes:
            names = [node.name for node in gone if node.name]
            few = job_lines.too_few_left(left=left, min_nodes=rules.min_nodes)
            return f"{few}; lost launchers are not restarted{f': {listed(names)}' if names else ''}"
        self.alarm_s = earliest(self.alarm_s, *later_s)
        return ""

    def _start_cycle(self, cycle: JobCycle | None, ready: list[Node]) -> Plan:
        rules = self._rules
        bad, named = self.bad_nodes.bad_among(ready), self.bad_nodes.blamed_instance(cycle)
        chosen, self._next_slots = choose(self._slots, ready, rules.max_nodes, rules.segment, bad=bad, named=named)
        rotation = Rotation.NONE if cycle is None or cycle.verdict is None else cycle.verdict.rotation
        if rotation is Rotation.NODES:
            chosen = rotated(chosen, within=rules.segment)
            self._next_slots = rotated_slots(self._next_slots, chosen)
        takes_part = set(chosen)
        spares = [node for node in ready if node not in takes_part]
        attachments = Parts(*(each for part in self._parts for each in part.attachment(chosen, spares)))
        last = None if cycle is None else cycle.decision
        used = 0 if cycle is None else cycle.decision.restarts + (cycle.outcome is Outcome.FAILED)
        decision = Decision(
            -1,
            "",
            DecisionKind.START,
            cycle=0 if last is None else last.cycle + 1,
            world=len(chosen),
            restarts=used,
            advance=furthest(node.hello.before for node in ready) if cycle is None else cycle.advance,
            back=self.bad_nodes.take_returned(ready),
            shift=(0 if last is None else last.shift) + (rotation is Rotation.RANKS),
            attachments=attachments,
        )
        return Plan(decision, chosen)


def nodes_left(cycle: JobCycle | None, nodes: Collection[Node]) -> int:
    """Return how many nodes could take part in another cycle, as far as is known; ``nodes``: all that ever came."""
    here = sum(not (node.is_excluded or node.is_gone) for node in nodes)
    if cycle is None:
        return here
    excluded = [seat.node for seat in cycle.seats if seat.state is NodeState.EXCLUDED]
    leaving = sum(not (node.is_excluded or node.is_gone) for node in excluded)
    # of those that the scheduler has started, one that is slow to start may not have come before cycle 0
    arrivals = max(node.arrived for node in nodes)
    late = 0 if cycle.decision.cycle else max(0, cycle.rules.launchers - max(arrivals, cycle.decision.world))
    return here - leaving + late
