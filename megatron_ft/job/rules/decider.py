"""Decisions of one leader: numbered, and each given to the lock's holder before any launcher hears of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from megatron_ft.job.rules.actions import CoordinatorEffect, Decided, Send
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.messages import Beat, Hello
from megatron_ft.job.rules.nodes import Node


@dataclass(slots=True)
class Plan:
    """The next decision. ``members``: the nodes with a place in it, by place; none at the job's end.

    ``waiting``: members that haven't answered since they were asked whether they are still alive.
    """

    decision: Decision
    members: dict[int, Node]
    waiting: set[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = set(self.members.values())


class Decider:
    """``name``: no two leaders have the same. ``record``: that of the last decision; None: there is none, as far as
    known. Then the leader may take over what launchers know, until it has made a decision itself.
    """

    def __init__(
        self,
        name: str,
        record: DecisionRecord | None,
        *,
        may_adopt: bool,
        emit: Callable[[CoordinatorEffect], None],
    ) -> None:
        self.record = record
        self.plan: Plan | None = None
        self._name, self._emit = name, emit
        self._may_adopt = may_adopt
        self._count = 0
        self._places: dict[str, int] = {}
        self._index()

    @property
    def decision(self) -> Decision | None:
        return None if self.record is None else self.record.decision

    def next(self, kind: DecisionKind, **more: Any) -> Decision:
        """Return a decision to plan."""
        last = self.decision
        self._count += 1
        name = f"{self._name}.{self._count}"
        number, founding = (0, name) if last is None else (last.number + 1, last.founding)
        return Decision(number, name, kind, founding=founding, **more)

    def adopt(self, hello: Hello) -> bool:
        """Take over the decision that a launcher knows, if this leader has none later; return True if it does."""
        held, last = hello.decided, self.decision
        if held is None or not self._may_adopt or (last is not None and last.number >= held.decision.number):
            return False
        self.take(DecisionRecord(held.decision, held.store))
        return True

    def take(self, record: DecisionRecord) -> None:
        """Take over the last decision of an earlier leader."""
        self.record, self.plan = record, None
        self._index()

    def begin(self, plan: Plan) -> None:
        """Ask the members for a sign of life; ``settle`` decides once all have answered."""
        self.plan = plan
        self._count += 1
        links = [node.link for node in plan.members.values() if node.link is not None]
        if links:
            self._emit(Send(links, Beat(self._count)))

    def answered(self, node: Node, number: int) -> None:
        """A launcher has answered the last question, or an earlier one."""
        if self.plan is not None and number == self._count:
            self.plan.waiting.discard(node)

    def went(self, node: Node) -> None:
        """The launcher's connection has ended, or its node isn't ready any more: plan again without it."""
        if self.plan is not None and node in self.plan.members.values():
            self.plan = None

    def settle(self, nodes: Iterable[Node]) -> Plan | None:
        """Make the decision that is planned, and tell all ``nodes``, if its members have answered; return it then."""
        plan = self.plan
        if plan is None or plan.waiting:
            return None
        self.plan, self._may_adopt = None, False
        decision, members = plan.decision, [plan.members[place] for place in sorted(plan.members)]
        if decision.kind is DecisionKind.START:
            instances, names = tuple(node.instance for node in members), tuple(node.name for node in members)
            self.record = DecisionRecord(decision, members[0].standing.store, instances, names)
        else:  # the launchers of the last cycle are to hear of it
            self.record = replace(self.record or DecisionRecord(decision), decision=decision)
        self._index()
        self._emit(Decided(self.record))
        for place, node in enumerate(members):
            self.tell(node, place)
        outside, held = [], Assignment(decision)
        for node in nodes:
            if node.link is not None and (not members or node.instance not in self._places):
                outside.append(node.link)
                node.learn(held)
        if outside:
            self._emit(Send(outside, held))
        return plan

    def tell(self, node: Node, place: int | None) -> None:
        """Send the last decision to a launcher, which has this place by it."""
        assert self.record is not None
        held = Assignment(self.record.decision, place, "" if place is None else self.record.store)
        node.learn(held)
        if node.link is not None:
            self._emit(Send([node.link], held))

    def place_of(self, node: Node) -> int | None:
        """Return the place of a launcher by the last decision; None if it has none, as far as known."""
        held, decision = node.decided, self.decision
        if held is not None and decision is not None and held.decision.id == decision.id:
            return held.place
        return self._places.get(node.instance)

    def _index(self) -> None:
        instances = () if self.record is None else self.record.instances
        self._places = {instance: place for place, instance in enumerate(instances)}
