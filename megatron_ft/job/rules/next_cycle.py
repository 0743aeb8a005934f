"""The next decision, and its time: the next cycle, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.core.times import earliest
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.bad_nodes import BadNodeTracker
from megatron_ft.job.rules.decider import Decider, Plan
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.job_cycle import JobCycle, printer
from megatron_ft.job.rules.leader_part import LeaderPart
from megatron_ft.job.rules.liveness import lost_s
from megatron_ft.job.rules.member import CUT_OFF_S
from megatron_ft.job.rules.messages import NodePhase, Rules
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import Slot, choose, choose_segments, rotated_slots, usable
from megatron_ft.job.rules.restart_policy import NodeState, Outcome, furthest
from megatron_ft.job.rules.rotation import Rotation, rotated_within

_FIRST_CALL_S = 30.0
_LAST_CALL_S = 1.0


def may_be_back_s(nodes: int) -> float:
    """Seconds after which a launcher that is cut off has given up, where no single launcher is started again."""
    return max(lost_s(nodes), CUT_OFF_S) + 5.0


def last_call_s(rules: Rules, *, is_first: bool) -> float:
    """Return the seconds a round stays open for more nodes once there are enough; ``is_first``: the first round."""
    if rules.last_call_s is not None:
        return rules.last_call_s
    return _FIRST_CALL_S if is_first else _LAST_CALL_S


@dataclass(slots=True)
class RoundCompletion:
    """When the nodes that are ready begin a cycle, and when they wait for more: one for all rounds of a coordinator.

    Args:
        alarm_s: when to ask again at the latest.
        waits_s: since when there have been too few.
    """

    alarm_s: float | None = None
    waits_s: float | None = None
    _seen: tuple[int, int] = (0, 0)
    _settled_s: float = 0.0
    _met_s: float | None = None
    """When there were enough in this round for the first time, and none was awaited."""

    def begin_round(self) -> None:
        """A cycle has begun: what follows it is another round."""
        self._met_s = None

    def update(
        self, rules: Rules, *, ready: int, awaited: bool, last: int, patient: bool, arrivals: int, now_s: float
    ) -> bool:
        """Take note of how the nodes are now; returns whether those that are ready begin a cycle.

        ``awaited``: nodes of the last cycle, which had ``last`` (0: there was none), are alive and not ready yet;
        ``arrivals`` counts the launchers that ever came; ``patient``: the last cycle ended because nodes left or
        joined, so more may come.
        """
        self.alarm_s = None
        if ready >= rules.min_nodes:
            self.waits_s = None
        elif self.waits_s is None:
            self.waits_s = now_s
        if self._seen != (min(ready, rules.min_nodes), arrivals if last else 0) or awaited:
            self._seen, self._settled_s = (min(ready, rules.min_nodes), arrivals if last else 0), now_s
        if ready < rules.min_nodes:
            self.alarm_s = (self.waits_s or now_s) + rules.join_timeout_s
            return False
        if awaited:
            return False
        self._met_s = now_s if self._met_s is None else self._met_s
        if ready >= rules.max_nodes or (0 < last <= ready and rules.last_call_s is None and not patient):
            return True
        call_s = last_call_s(rules, is_first=last == 0)
        # nodes that come and go over a bad network begin the last call anew, but not for ever
        self.alarm_s = min(self._settled_s + call_s, self._met_s + max(call_s, rules.join_timeout_s))
        return now_s >= self.alarm_s

    def has_waited_long(self, rules: Rules, now_s: float) -> bool:
        """Whether nodes that are needed haven't come in the time in which a round must be met."""
        return self.waits_s is not None and now_s >= self.waits_s + rules.join_timeout_s


class NextCycle:
    """One coordinator's. ``nodes``: all launchers by instance. Times are seconds of the coordinator's clock."""

    def __init__(self, decider: Decider, nodes: Mapping[str, Node], parts: Sequence[LeaderPart]) -> None:
        self._parts = parts
        self.alarm_s: float | None = None
        """When to call ``due`` again, at the latest."""
        self.bad_nodes = BadNodeTracker()
        self._decider = decider
        self._nodes = nodes
        self._completion = RoundCompletion()
        self._slots: list[Slot] = []
        self._next_slots: list[Slot] = []
        self._known: dict[str, Node] = {}
        """All launchers that have ever connected, by instance."""
        self._are_slots_taken_over = False
        """The slots are those of a cycle that another leader has begun: the launchers say who they are."""
        self._took_over_s: float | None = None
        """Since when it leads a job that another leader led before, whose launchers it needn't all have met."""

    def connected(self, node: Node) -> None:
        if node.phase is not NodePhase.EXCLUDED:
            self._known[node.instance] = node

    def restore_place(self, node: Node) -> None:
        """A launcher reports its place in the last cycle, which this leader may not know."""
        if self._are_slots_taken_over and node.place is not None:
            self._slots[node.place] = Slot.of(node)

    def cycle_began(self) -> None:
        """The cycle that was planned last has begun."""
        self._completion.begin_round()
        self._slots, self._are_slots_taken_over = self._next_slots, False

    def took_over(self, record: DecisionRecord, now_s: float) -> None:
        """Note a decision that another leader has made."""
        self._took_over_s, self._are_slots_taken_over = now_s, True
        world = record.decision.world
        instances = record.instances or [f"{record.decision.id} {place}" for place in range(world)]
        names = record.names or world * ("",)
        self._slots = [Slot(*each) for each in zip(instances, names, strict=True)]

    def due(self, rules: Rules, cycle: JobCycle | None, *, arrivals: int, now_s: float) -> Plan | None:
        """Return the decision to plan, if one is due: the next cycle, or the end of the job."""
        self.alarm_s = None
        if self._decider.plan is not None or (cycle is not None and cycle.outcome is None):
            return None
        if cycle is not None and not cycle.restarts:
            if cycle.verdict is None or cycle.awaited > 0 or self._awaits:
                return None
            if cycle.shutdown and cycle.outcome is not Outcome.SUCCEEDED:  # a request after that comes too late
                return self.end_job(cycle, 1, cycle.shutdown_text)
            return self.end_job(cycle, cycle.verdict.code, cycle.verdict.cause_for(None).text)
        if self._is_complete(rules, cycle, arrivals, now_s):
            return self._start_cycle(rules, cycle, self._ready)
        if too_few := self._too_few_for_ever(rules, cycle, now_s):
            return self.end_job(cycle, rules.try_again_code, too_few)
        if self._completion.has_waited_long(rules, now_s):
            more = rules.min_nodes - usable(self._ready, rules.segment)
            aside = sum(node.phase is NodePhase.ASIDE for node in self._nodes.values())
            text = job_lines.did_not_come(more, seconds=rules.join_timeout_s, aside=aside)
            return self.end_job(cycle, rules.try_again_code, text)
        return None

    @property
    def _ready(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.phase is NodePhase.READY and node.link is not None]

    @property
    def _awaits(self) -> bool:
        return any(is_awaited(node) for node in self._nodes.values())

    def _too_few_for_ever(self, rules: Rules, cycle: JobCycle | None, now_s: float) -> str:
        """Why too few nodes are left, where lost launchers aren't started again; empty if enough are left."""
        if not rules.launchers:
            return ""
        gone = [node for instance, node in self._known.items() if instance not in self._nodes]
        back_s = may_be_back_s(len(self._known))
        names = [node.name for node in gone]
        until_s = [node.gone_s + back_s for node in gone if node.silent or node.was_reset]
        left = rules.launchers - len(gone)
        if self._took_over_s is not None:
            unmet = max(0, rules.launchers - len(self._known))
            left -= unmet
            until_s += [self._took_over_s + back_s] * unmet
            names += [seat.name for seat in cycle.seats if seat.name and not seat.instance] if cycle else []
        later_s = [at_s for at_s in until_s if at_s > now_s]
        if left + len(later_s) < rules.min_nodes:
            return job_lines.gone_for_good(left=left, min_nodes=rules.min_nodes, names=names)
        self.alarm_s = earliest(self.alarm_s, *later_s)
        return ""

    def _start_cycle(self, rules: Rules, cycle: JobCycle | None, ready: list[Node]) -> Plan:
        bad, named = self.bad_nodes.bad_among(ready), self.bad_nodes.blamed_instance(cycle)
        if rules.segment:
            chosen = choose_segments(self._slots, ready, rules.max_nodes, rules.segment, bad=bad, named=named)
            self._next_slots = [Slot.of(node) for node in chosen]
        else:
            chosen, self._next_slots = choose(self._slots, ready, rules.max_nodes, bad=bad, named=named)
        rotation = Rotation.NONE if cycle is None or cycle.verdict is None else cycle.verdict.rotation
        if rotation is Rotation.NODES:
            chosen = rotated_within(chosen, rules.segment)
            self._next_slots = rotated_slots(self._next_slots, chosen)
        takes_part = set(chosen)
        spares = [node for node in ready if node not in takes_part]
        attachments = {name: value for part in self._parts for name, value in part.attachment(chosen, spares).items()}
        shift = 0 if cycle is None else cycle.decision.shift
        decision = self._decider.next(
            DecisionKind.START,
            cycle=0 if cycle is None else cycle.decision.cycle + 1,
            world=len(chosen),
            restarts=0 if cycle is None else cycle.restarts_used,
            advance=furthest(node.before for node in ready) if cycle is None else cycle.advance,
            back=self.bad_nodes.take_returned(ready),
            shift=shift + (rotation is Rotation.RANKS),
            **attachments,
        )
        return Plan(decision, dict(enumerate(chosen)))

    def meet(self, rules: Rules, *, arrivals: int, now_s: float) -> bool:
        """Note that nodes meet for the first cycle, which can't be decided yet; return True if there are enough."""
        self._is_complete(rules, None, arrivals, now_s)
        return self._completion.waits_s is None

    def _is_complete(self, rules: Rules, cycle: JobCycle | None, arrivals: int, now_s: float) -> bool:
        # thousands meet: as long as they are too few, whether they are ready or not, none of them is looked at
        ready = self._ready if len(self._nodes) >= rules.min_nodes else []
        complete = self._completion.update(
            rules,
            ready=usable(ready, rules.segment),
            awaited=bool(ready) and ((cycle is not None and cycle.awaited > 0) or self._awaits),
            last=0 if cycle is None else cycle.decision.world,
            patient=cycle is not None and cycle.outcome is Outcome.MEMBERSHIP,
            arrivals=arrivals,
            now_s=now_s,
        )
        self.alarm_s = self._completion.alarm_s
        return complete

    def end_job(self, cycle: JobCycle | None, code: int, text: str) -> Plan:
        """Return the decision that the job ends."""
        last, first = self._decider.decision, printer(cycle, self._nodes.values())
        decision = self._decider.next(
            DecisionKind.END,
            cycle=-1 if last is None else last.cycle,
            world=0 if last is None else last.world,
            restarts=0 if last is None else last.restarts,
            advance=furthest(node.before for node in self._nodes.values()) if cycle is None else cycle.advance,
            code=code,
            text=text,
            printer="" if first is None else first.instance,
        )
        return Plan(decision, {})


def nodes_left(cycle: JobCycle | None, nodes: Mapping[str, Node], arrivals: int) -> int:
    """How many nodes could take part in another cycle, as far as is known; ``arrivals``: launchers that ever came."""
    here = sum(node.phase is not NodePhase.EXCLUDED for node in nodes.values())
    if cycle is None:
        return here
    leaving = sum(s.state is NodeState.EXCLUDED and s.instance in nodes for s in cycle.seats if cycle.lost)
    # of those that the scheduler has started, one that is slow to start may not have come before cycle 0
    late = 0 if cycle.decision.cycle else max(0, cycle.rules.launchers - max(arrivals, cycle.decision.world))
    return here - leaving + cycle.awaited + late


def is_awaited(node: Node) -> bool:
    """Whether no cycle begins before this node is ready, or known to be lost."""
    if node.place is None:
        return False
    return node.phase in (NodePhase.BUSY, NodePhase.RUNNING) or (node.link is None and node.phase is NodePhase.READY)
