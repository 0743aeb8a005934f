"""Lines for the user while a cycle runs or nodes meet: what they say, and when. Pure.

They come from the leader, because only it knows the state of all nodes. A line about the job is printed by one
launcher: the one at the lowest place whose node takes part and is connected. In a job of at most ``FEW`` nodes the
others get it, too, for users who want all lines of all nodes. Times are seconds of the leader's own clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.actions import Send
from megatron_ft.job.rules.job_cycle import GONE, GOOD, JobCycle
from megatron_ft.job.rules.messages import NodePhase, Tell
from megatron_ft.job.rules.next_cycle import last_call_s
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import usable
from megatron_ft.job.rules.restart_policy import NodeState, Rules
from megatron_ft.link.base.hosts import natural
from megatron_ft.link.base.times import earliest

_T = TypeVar("_T")
FEW = 100
_LONG_S, _AGAIN_FACTOR = 3.0, 10.0
"""Time after which a round gets a line what it waits for; and a factor, for the next ones."""
_SOON_S = 1.0
"""Nodes that finish within this time of each other get no line that they wait; standby nodes are checked as often."""


class Announcements:
    """One leader's. ``nodes``: all launchers by instance."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.alarm_s: float | None = None
        """When to call ``due`` at the latest."""
        self._nodes = nodes
        self._round: tuple[float, float] | None = None
        """Nodes wait in a round: since when, and when to say so next."""
        self._finished: dict[int, float] = {}
        """Places whose nodes have finished, and when to send them a line what they wait for."""
        self._spares: set[str] = set()
        """Launchers (instances) that were already reported as on standby."""
        self._spares_s = 0.0
        self._cycle: JobCycle | None = None

    def due(self, rules: Rules, cycle: JobCycle | None, *, now_s: float, begins: bool) -> list[Send]:
        """Return the lines that are due. If the next cycle ``begins`` a round waits for nobody."""
        self.alarm_s = None
        if cycle is not self._cycle:
            self._cycle = cycle
            self._finished.clear()
            self._spares_s = now_s + _SOON_S
        if cycle is not None and cycle.outcome is None:
            self._round = None
            return [
                *self._departures(cycle),
                *self._changes(rules, cycle, now_s),
                *self._waiting_to_end(cycle, now_s),
                *self._standby(cycle, now_s),
            ]
        lines: list[Send] = []
        if cycle is not None:
            lines += self._departures(cycle)
            if not cycle.restarts:
                return lines
            lines += self._losses(rules, cycle)
        return [*lines, *([] if begins else self._waiting_to_begin(rules, cycle, now_s))]

    def say(self, cycle: JobCycle | None, text: str, ready: Sequence[Node] = ()) -> list[Send]:
        """Send a line about the whole job to the nodes of its cycle, or to those that are ``ready``."""
        nodes = ready or [node for node in self._nodes.values() if cycle is not None and cycle.is_seated(node)]
        links = [node.link for node in nodes if node.link is not None]
        first = printer(cycle, nodes)
        if first is None or first.link is None:
            return []
        return [Send(links if len(nodes) <= FEW else [first.link], Tell(text, first.instance))]

    # -- a cycle runs -----------------------------------------------------------------------------------------

    def _changes(self, rules: Rules, cycle: JobCycle, now_s: float) -> Iterable[Send]:
        """A line on nodes that have failed, where the others go on; nodes that have finished are noted for later."""
        bad = []
        for place in _taken(cycle.changes):
            if cycle.seats[place].state is NodeState.SUCCEEDED:
                self._finished[place] = now_s + _SOON_S
            elif cycle.seats[place].state not in GOOD:
                bad.append(place)
        if not bad or not rules.min_healthy or len(cycle.seats) == 1:
            return  # with the other policy the cycle ends, at the latest when the hang diagnosis is complete
        text = job_lines.node_changed(
            cycle=cycle.decision.cycle,
            told=cycle.told(bad),
            good=cycle.count(*GOOD),
            min_nodes=rules.min_nodes,
            has_store=0 in bad and cycle.seats[0].state in GONE,
        )
        yield from self.say(cycle, text)

    def _waiting_to_end(self, cycle: JobCycle, now_s: float) -> Iterable[Send]:
        """A line to nodes that have finished, and have to wait for others that haven't."""
        due = [place for place, at_s in self._finished.items() if now_s >= at_s]
        for place in due:
            del self._finished[place]
        if due:
            others = cycle.count(NodeState.HEALTHY)
            seated = cycle.links()
            links = [seated[place] for place in due if place in seated]
            yield Send(links, Tell(job_lines.waiting_for_others(cycle=cycle.decision.cycle, others=others)))
        for at_s in self._finished.values():
            self._wake(at_s)

    def _standby(self, cycle: JobCycle, now_s: float) -> Iterable[Send]:
        """A line on nodes on standby: one for each, until it takes part in a cycle."""
        if now_s < self._spares_s:
            self._wake(self._spares_s)
            return
        self._spares_s = now_s + _SOON_S
        self._wake(self._spares_s)
        spares = [node for node in self._nodes.values() if node.is_ready and not cycle.is_seated(node)]
        new = [node for node in spares if node.instance not in self._spares]
        self._spares = {node.instance for node in spares}
        if not new:
            return
        running = len(cycle.seats) - cycle.count(*GONE)
        yield Send([node.link for node in new if node.link is not None], Tell(job_lines.standing_by(running)))
        names = sorted((node.name for node in new), key=natural)
        yield from self.say(cycle, job_lines.others_stand_by(names))

    def _departures(self, cycle: JobCycle) -> Iterable[Send]:
        """Nodes that have left, for the launcher that prints the lines of the job."""
        first = printer(cycle, self._nodes.values()) if cycle.departures else None
        if first is not None and first.link is not None:
            yield from (Send([first.link], each) for each in _taken(cycle.departures))

    # -- nodes meet -------------------------------------------------------------------------------------------

    def _losses(self, rules: Rules, cycle: JobCycle) -> Iterable[Send]:
        """A line on nodes lost since the cycle ended, other than the one that ended it."""
        verdict = cycle.verdict
        assert verdict is not None
        gone = {place: report for place, report in _taken(cycle.losses) if place != verdict.node}
        if not gone:
            return
        unfit = (NodePhase.ASIDE, NodePhase.EXCLUDED)
        fit = sum(node.link is not None and node.phase not in unfit for node in self._nodes.values())
        told, are_enough = cycle.told(gone, gone), fit >= rules.min_nodes
        yield from self.say(cycle, job_lines.lost_between(told=told, several=len(gone) > 1, are_enough=are_enough))

    def _waiting_to_begin(self, rules: Rules, cycle: JobCycle | None, now_s: float) -> Iterable[Send]:
        """A round takes long: say which nodes are missing, after 3 s, 30 s, 300 s."""
        since_s, next_s = self._round or (now_s, now_s + _LONG_S)
        ready = [node for node in self._nodes.values() if node.is_ready]
        if not ready:
            self._round = None
            return
        if now_s >= next_s:
            next_s = since_s + (next_s - since_s) * _AGAIN_FACTOR
            yield from self.say(cycle, self._for_whom(rules, cycle, ready), ready)
        self._round = since_s, next_s
        self._wake(next_s)

    def _for_whom(self, rules: Rules, cycle: JobCycle | None, ready: list[Node]) -> str:
        nodes = self._nodes.values()
        missing = [node.name or job_lines.node(node.place or 0, "") for node in nodes if node.is_awaited]
        gone = [cycle.seats[place].name or job_lines.node(place, "") for place in cycle.gone] if cycle else []
        back = [node.name for node in ready if cycle is None or not cycle.is_seated(node)]  # on the same hosts
        enough = usable(ready, rules.segment)
        return job_lines.waiting_for_nodes(
            here=sorted((node.name for node in ready), key=natural),
            more=max(rules.min_nodes - enough, len(missing), 0),
            room=rules.max_nodes - enough,
            last_call_s=last_call_s(rules, is_first=cycle is None),
            odd=len(ready) - enough,
            missing=sorted(missing, key=natural),
            lost=sorted((Counter(gone) - Counter(back)).elements(), key=natural),
            aside=sorted((node.name for node in nodes if node.phase is NodePhase.ASIDE), key=natural),
            cycle=None if cycle is None else cycle.decision.cycle,
        )

    def _wake(self, at_s: float) -> None:
        self.alarm_s = earliest(self.alarm_s, at_s)


def printer(cycle: JobCycle | None, nodes: Iterable[Node]) -> Node | None:
    """Return the launcher that prints the lines of the job; None if none is connected."""

    def order(node: Node) -> tuple[bool, float, float, int]:
        place, rank = node.place, node.hello.rank
        is_outside = cycle is None or not cycle.is_seated(node)
        return is_outside, math.inf if place is None else place, math.inf if rank is None else rank, node.arrived

    here = (node for node in nodes if node.link is not None and not node.is_excluded)
    return min(here, key=order, default=None)


def _taken(news: list[_T]) -> list[_T]:
    taken = news[:]
    news.clear()
    return taken
