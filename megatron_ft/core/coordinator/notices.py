"""Lines for the user while a cycle runs or nodes meet: what they say, when, and which launcher prints them. Pure.

They come from the coordinator, because only it knows the state of all nodes. A line about the job goes to all that take
part, in a job of at most ``FEW`` nodes, and one of them prints it: the one at place 0 (or the lowest place whose
launcher is connected). The others get copies, for users who want all lines of all nodes. In a larger job a line about
one node goes only to that node and to the one that prints it, so that no 10,000 copies are sent.
Times are seconds of the coordinator's own clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_ft.core.coordinator.decider import Plan
from megatron_ft.core.coordinator.job_cycle import JobCycle
from megatron_ft.core.coordinator.job_phases import JobState
from megatron_ft.core.coordinator.next_cycle import is_awaited, last_call_s
from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.coordinator.places import usable
from megatron_ft.core.coordinator.verdict import GOOD
from megatron_ft.core.hosts import natural
from megatron_ft.core.job import job_lines
from megatron_ft.core.job.actions import Send
from megatron_ft.core.job.decisions import DecisionKind
from megatron_ft.core.job.messages import NodePhase, PrintJobLines, Rules, Tell
from megatron_ft.core.job.restart_policy import NodeState
from megatron_ft.core.times import earliest

FEW = 100
_LONG_S = 3.0
"""A round that takes no longer isn't worth a line."""
_AGAIN_FACTOR = 10.0
_TOGETHER_S = 0.5
"""Nodes that are due a line within this time get the same one; waiting nodes are checked this often."""
_SOON_S = 1.0
"""Nodes that finish within this time of each other get no line that they wait; standby nodes are checked as often."""


class Notices:
    """One coordinator's. ``nodes``: all launchers by instance."""

    def __init__(self, state: JobState, nodes: Mapping[str, Node]) -> None:
        self._state = state
        self.alarm_s: float | None = None
        """When to call ``tell`` at the latest."""
        self._nodes = nodes
        self._waits: dict[Node, tuple[float, float]] = {}
        """Nodes that wait in a round: since when, and when to send the next line."""
        self._waits_s = 0.0
        """When to check them next: not at each message of thousands of nodes that meet."""
        self._finished: dict[int, float] = {}
        """Places whose nodes have finished, and when to send them a line what they wait for."""
        self._spares: set[str] = set()
        """Launchers (instances) that were already reported as on standby."""
        self._spares_s = 0.0
        self._cycle: JobCycle | None = None
        self._speaker: int | None = None
        """The connection of the launcher that was last asked to print the lines of the job."""

    def tell(self, rules: Rules, cycle: JobCycle | None, plan: Plan | None, *, now_s: float) -> list[Send]:
        """The lines that are due. Without an open ``plan`` a round can only be waiting for nodes."""
        self.alarm_s = None
        if cycle is not self._cycle:
            self._cycle = cycle
            self._speaker = None  # launchers forget it, too, when they begin the cycle
            self._finished.clear()
            self._spares_s = now_s + _SOON_S
        if plan is not None and plan.decision.kind is DecisionKind.END:
            return [*self._who_says_why(cycle)]
        told = [] if cycle is None else [*self._who_speaks(cycle, plan), *self._departures(cycle)]
        if cycle is not None and self._state.is_running:
            self._waits.clear()
            self._waits_s = 0.0
            return [
                *told,
                *self._changes(rules, cycle, now_s),
                *self._waiting_to_end(cycle, now_s),
                *self._standby(cycle, now_s),
            ]
        if cycle is not None:
            if not self._state.gathers:
                return told
            told += self._losses(rules, cycle)
        return [*told, *(self._waiting_to_begin(rules, cycle, now_s) if plan is None else ())]

    def restored(self, cycle: JobCycle, newer_than: int | None) -> Iterable[Send]:
        """A line that the ranks of all nodes have restored their state from memory."""
        restore = cycle.decision.restore
        assert restore is not None
        return self._to_those_concerned(cycle, (), job_lines.restored(restore, newer_than))

    def without_snapshot(self, cycle: JobCycle, reason: str) -> Iterable[Send]:
        """A line that a cycle which begins goes on from no snapshot, though there are some."""
        return self._to_those_concerned(cycle, (), job_lines.without_snapshot(cycle.decision.cycle, reason))

    # -- a cycle runs -----------------------------------------------------------------------------------------

    def _changes(self, rules: Rules, cycle: JobCycle, now_s: float) -> Iterable[Send]:
        """A line on nodes that have failed, where the others go on; nodes that have finished are noted for later."""
        bad = []
        for place in cycle.take_changes():
            if cycle.seats[place].state is NodeState.SUCCEEDED:
                self._finished[place] = now_s + _SOON_S
            elif cycle.seats[place].state not in GOOD:
                bad.append(place)
        if not bad or not rules.min_healthy or len(cycle.seats) == 1:
            return  # with the other policy the cycle ends, at the latest when the hang diagnosis is complete
        told = (job_lines.bad(p, (seat := cycle.seats[p]).name, seat.state.value, seat.report.cause.text) for p in bad)
        text = job_lines.node_changed(
            cycle=cycle.decision.cycle,
            told=job_lines.joined(told),
            good=cycle.count(*GOOD),
            min_nodes=rules.min_nodes,
            has_store=0 in bad and cycle.seats[0].state in (NodeState.LOST, NodeState.EXCLUDED),
        )
        yield from self._to_those_concerned(cycle, bad, text)

    def _waiting_to_end(self, cycle: JobCycle, now_s: float) -> Iterable[Send]:
        """A line to nodes that have finished, and have to wait for others that haven't."""
        due = [place for place, at_s in self._finished.items() if now_s >= at_s]
        for place in due:
            del self._finished[place]
        if due:
            others = cycle.count(NodeState.HEALTHY)
            seated = cycle.links(self._nodes.values())
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
        spares = [
            node
            for node in self._nodes.values()
            if node.phase is NodePhase.READY and node.link is not None and not cycle.is_seated(node)
        ]
        new = [node for node in spares if node.instance not in self._spares]
        self._spares = {node.instance for node in spares}
        if not new:
            return
        running = len(cycle.seats) - cycle.count(NodeState.LOST, NodeState.EXCLUDED)
        yield Send([node.link for node in new if node.link is not None], Tell(job_lines.standing_by(running)))
        names = sorted((node.name for node in new), key=natural)
        yield from self._to_those_concerned(cycle, (), job_lines.others_stand_by(names))

    def _departures(self, cycle: JobCycle) -> Iterable[Send]:
        """Nodes that have left, for the launcher that prints the lines of the job."""
        seated = cycle.links(self._nodes.values())
        if seated:
            yield from (Send([seated[min(seated)]], each) for each in cycle.take_departures())

    # -- nodes meet -------------------------------------------------------------------------------------------

    def _losses(self, rules: Rules, cycle: JobCycle) -> Iterable[Send]:
        """A line on nodes lost since the cycle ended, other than the one that ended it."""
        gone = cycle.take_losses()
        if not gone:
            return
        unfit = (NodePhase.ASIDE, NodePhase.EXCLUDED)
        fit = sum(node.link is not None and node.phase not in unfit for node in self._nodes.values())
        told = (
            job_lines.leaves(place, cycle.seats[place].name, report.cause.text)
            if report.state is NodeState.EXCLUDED
            else job_lines.bad(place, cycle.seats[place].name, report.state.value, report.cause.text)
            for place, report in gone
        )
        text = job_lines.lost_between(
            told=job_lines.joined(told), several=len(gone) > 1, are_enough=fit >= rules.min_nodes
        )
        yield from self._to_those_concerned(cycle, [], text)

    def _waiting_to_begin(self, rules: Rules, cycle: JobCycle | None, now_s: float) -> Iterable[Send]:
        """A round takes long: tell each waiting node which are missing, after 3 s, 30 s, 300 s (up to 0.5 s later)."""
        if now_s < self._waits_s:
            self._wake(self._waits_s)
            return
        ready = [node for node in self._nodes.values() if node.phase is NodePhase.READY and node.link is not None]
        self._waits = {node: self._waits.get(node) or (now_s, now_s + _LONG_S) for node in ready}
        if any(now_s >= next_s for _, next_s in self._waits.values()):
            due = []
            for node, (since_s, next_s) in self._waits.items():
                if now_s >= next_s - 1.5 * _TOGETHER_S:
                    self._waits[node] = since_s, since_s + (next_s - since_s) * _AGAIN_FACTOR
                    due.append(node)
            links = [node.link for node in sorted(due, key=_order) if node.link is not None]
            yield from _by_one(links, next(iter(links), None), self._for_whom(rules, cycle, ready))
        if ready:
            self._waits_s = min(now_s + _TOGETHER_S, min(next_s for _, next_s in self._waits.values()))
            self._wake(self._waits_s)

    def _for_whom(self, rules: Rules, cycle: JobCycle | None, ready: list[Node]) -> str:
        nodes = self._nodes.values()
        missing = [node.name for node in nodes if is_awaited(node)]
        lost: list[str] = []
        if cycle is not None:
            taken = {node.place for node in nodes if cycle.is_seated(node)}
            back = Counter(node.name for node in ready if not cycle.is_seated(node))
            for place, seat in enumerate(cycle.seats):
                name = seat.name or job_lines.node(place, "")
                if cycle.is_missing(place):
                    missing.append(name)
                elif place not in taken and back[name]:
                    back[name] -= 1  # a new launcher on the same host
                elif place not in taken:
                    lost.append(name)
        enough = usable(ready, rules.segment)
        return job_lines.waiting_for_nodes(
            here=sorted((node.name for node in ready), key=natural),
            more=max(rules.min_nodes - enough, len(missing), 0),
            room=rules.max_nodes - enough,
            last_call_s=last_call_s(rules, is_first=cycle is None),
            odd=len(ready) - enough,
            missing=sorted(missing, key=natural),
            lost=sorted(lost, key=natural),
            aside=sorted((node.name for node in nodes if node.phase is NodePhase.ASIDE), key=natural),
            cycle=None if cycle is None else cycle.decision.cycle,
        )

    # -- which launchers get a line ---------------------------------------------------------------------------

    def _to_those_concerned(self, cycle: JobCycle, places: Iterable[int], text: str) -> Iterable[Send]:
        seated = cycle.links(self._nodes.values())
        if not seated:
            return
        speaker = seated[min(seated)]
        if len(cycle.seats) <= FEW:
            links = list(seated.values())
        else:
            links = list(dict.fromkeys([speaker, *(seated[place] for place in places if place in seated)]))
        yield from _by_one(links, speaker, text)

    def _who_speaks(self, cycle: JobCycle, plan: Plan | None) -> Iterable[Send]:
        """The launcher at place 0 prints the lines of the job; when its node has gone, the next one is asked to.

        So is who isn't here while the next cycle is agreed on. If all nodes were lost to this coordinator, it is the
        first one that has come back.
        """
        places = range(len(cycle.seats))
        here = (place for place in places if cycle.seats[place].instance in self._nodes)
        place = next((place for place in places if self._stays(cycle, place, plan)), next(here, 0))
        node = self._nodes.get(cycle.seats[place].instance)
        # one that doesn't follow yet may have to hear of this cycle first, and forgets with it that it was asked
        if place > 0 and node is not None and node.link not in (None, self._speaker):
            self._speaker = node.link
            yield Send([node.link], PrintJobLines())

    def _stays(self, cycle: JobCycle, place: int, plan: Plan | None) -> bool:
        node = self._nodes.get(cycle.seats[place].instance)
        return place not in cycle.gone and (plan is None or (node is not None and node.link is not None))

    def _who_says_why(self, cycle: JobCycle | None) -> Iterable[Send]:
        """The job is about to end: one that is connected is to say so, also where none has had a place yet."""
        here = [node for node in self._nodes.values() if node.phase is not NodePhase.EXCLUDED]
        node = min(here, key=lambda each: (cycle is None or not cycle.is_seated(each), _order(each)), default=None)
        if node is not None and node.link is not None and node.link != self._speaker:
            self._speaker = node.link
            yield Send([node.link], PrintJobLines())

    def _wake(self, at_s: float) -> None:
        self.alarm_s = earliest(self.alarm_s, at_s)


def _by_one(links: list[int], speaker: int | None, text: str) -> Iterable[Send]:
    """Send a line to all of these connections; the ``speaker`` prints it, the others get a copy."""
    if speaker in links:
        yield Send([speaker], Tell(text))
    if others := [link for link in links if link != speaker]:
        yield Send(others, Tell(text, is_copy=True))


def _order(node: Node) -> tuple[float, float, int]:
    """Sort key of nodes that meet: by their places so far."""
    place, rank = node.place, node.rank
    return math.inf if place is None else place, math.inf if rank is None else rank, node.arrived
