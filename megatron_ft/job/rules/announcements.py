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
from megatron_ft.job.rules.restart_policy import Rules
from megatron_ft.link.base.hosts import natural
from megatron_ft.link.base.wording import counted, listed

_T = TypeVar("_T")
FEW = 100
_LONG_S, _AGAIN_FACTOR = 3.0, 10.0
"""Time after which a round gets a line what it waits for; and a factor, for the next ones."""
_STANDBY_S = 1.0
"""Time between two looks for nodes on standby."""


class Announcements:
    """One leader's. ``nodes``: all launchers by instance."""

    def __init__(self, rules: Rules, nodes: Mapping[str, Node]) -> None:
        self._rules, self._nodes = rules, nodes
        self._round: tuple[float, float] | None = None
        """Nodes wait in a round: since when, and when to say so next."""
        self._spares: set[str] = set()
        """Launchers (instances) that were already reported as on standby."""
        self._spares_s = 0.0

    def due(self, cycle: JobCycle | None, *, now_s: float, begins: bool) -> list[Send]:
        """Return the lines that are due. If the next cycle ``begins`` a round waits for nobody."""
        lines: list[Send] = []
        if cycle is not None:
            first = printer(cycle, self._nodes.values()) if cycle.departures else None
            if first is not None and first.link is not None:
                lines += [Send([first.link], each) for each in _taken(cycle.departures)]
        if cycle is not None and cycle.outcome is None:
            self._round = None
            return [*lines, *self._changes(cycle), *self._standby(cycle, now_s)]
        if cycle is not None and cycle.restarts:
            lines += self._losses(cycle)
        if not begins and (cycle is None or cycle.restarts):
            lines += self._waiting_to_begin(cycle, now_s)
        return lines

    def say(self, cycle: JobCycle | None, text: str, ready: Sequence[Node] = ()) -> list[Send]:
        """Send a line about the whole job to the nodes of its cycle, or to those that are ``ready``."""
        nodes = ready or [node for node in self._nodes.values() if cycle is not None and cycle.is_seated(node)]
        links = [node.link for node in nodes if node.link is not None]
        first = printer(cycle, nodes)
        if first is None or first.link is None:
            return []
        return [Send(links if len(nodes) <= FEW else [first.link], Tell(text, first.instance))]

    # -- a cycle runs -----------------------------------------------------------------------------------------

    def _changes(self, cycle: JobCycle) -> list[Send]:
        """A line on nodes that have failed, where the others go on."""
        bad = [place for place in _taken(cycle.changes) if cycle.seats[place].state not in GOOD]
        if not bad or not self._rules.min_healthy or len(cycle.seats) == 1:
            return []  # with the other policy the cycle ends, at the latest when the hang diagnosis is complete
        store = ""
        if 0 in bad and cycle.seats[0].state in GONE:
            store = "; the ranks' store is lost with node 0: they can't make new process groups until the next restart"
        good = job_lines.good(cycle.count(*GOOD), self._rules.min_nodes)
        return self.say(cycle, f"cycle {cycle.decision.cycle}: {cycle.told(bad)}; continuing with {good}{store}")

    def _standby(self, cycle: JobCycle, now_s: float) -> list[Send]:
        """A line on nodes on standby: one for each, until it takes part in a cycle."""
        if now_s < self._spares_s:
            return []
        self._spares_s = now_s + _STANDBY_S
        spares = [node for node in self._nodes.values() if node.is_ready and not cycle.is_seated(node)]
        new = [node for node in spares if node.instance not in self._spares]
        self._spares = {node.instance for node in spares}
        if not new:
            return []
        count = len(cycle.seats) - cycle.count(*GONE)
        running = "1 node runs" if count == 1 else f"{count} nodes run"
        own = Tell(f"on standby for the next restart: {running} without this one")
        names = listed(sorted((node.name for node in new), key=natural))
        text = f"{counted(len(new), 'node')} on standby for the next restart: {names}"
        return [Send([node.link for node in new if node.link is not None], own), *self.say(cycle, text)]

    # -- nodes meet -------------------------------------------------------------------------------------------

    def _losses(self, cycle: JobCycle) -> list[Send]:
        """A line on nodes lost since the cycle ended, other than the one that ended it."""
        verdict = cycle.verdict
        assert verdict is not None
        gone = {place: report for place, report in _taken(cycle.losses) if place != verdict.node}
        if not gone:
            return []
        return self.say(cycle, cycle.told(gone, gone))

    def _waiting_to_begin(self, cycle: JobCycle | None, now_s: float) -> list[Send]:
        """A round takes long: say which nodes are missing, after 3 s, 30 s, 300 s."""
        since_s, next_s = self._round or (now_s, now_s + _LONG_S)
        ready = [node for node in self._nodes.values() if node.is_ready]
        if not ready:
            self._round = None
            return []
        lines = []
        if now_s >= next_s:
            next_s = since_s + (next_s - since_s) * _AGAIN_FACTOR
            lines = self.say(cycle, self._for_whom(cycle, ready), ready)
        self._round = since_s, next_s
        return lines

    def _for_whom(self, cycle: JobCycle | None, ready: list[Node]) -> str:
        """Return which nodes are here, which are missing (of the last cycle), and how many more are needed."""
        rules, nodes = self._rules, self._nodes.values()
        enough = usable(ready, rules.segment)
        missing = [node.name or job_lines.node(node.place or 0, "") for node in nodes if node.is_awaited]
        gone = [cycle.seats[place].name or job_lines.node(place, "") for place in cycle.gone] if cycle else []
        back = [node.name for node in ready if cycle is None or not cycle.is_seated(node)]  # on the same hosts
        aside = [node.name for node in nodes if node.phase is NodePhase.ASIDE and not node.is_gone]
        here, more, odd = len(ready), max(rules.min_nodes - enough, len(missing), 0), len(ready) - enough
        count = f"{here} of {here + more}" if more and not odd else f"{here}"
        parts = [f"{count} {'is' if here == 1 else 'are'} here: {_names(node.name for node in ready)}"]
        if odd:
            parts.append(f"{odd} of them not in a complete NVLink-domain segment (--ft-segment)")
        last = -1 if cycle is None else cycle.decision.cycle
        for what, names in (
            (f"missing since cycle {last}", missing),
            (f"lost in cycle {last}", (Counter(gone) - Counter(back)).elements()),
            ("failing their health check", aside),
        ):
            if told := _names(names):
                parts.append(f"{what}: {told}")
        if more:
            return f"waiting for {counted(more, 'more node')} ({'; '.join(parts)})"
        within = f"for at most {last_call_s(rules, is_first=cycle is None):g} s (--rdzv-conf last_call_timeout)"
        room = f"up to {rules.max_nodes - enough} more may join, {within}"
        return f"enough nodes to start; {room} ({'; '.join(parts)})"


def printer(cycle: JobCycle | None, nodes: Iterable[Node]) -> Node | None:
    """Return the launcher that prints the lines of the job; None if none is connected."""

    def order(node: Node) -> tuple[bool, float, float, int]:
        place, rank = node.place, node.hello.rank
        is_outside = cycle is None or not cycle.is_seated(node)
        return is_outside, math.inf if place is None else place, math.inf if rank is None else rank, node.arrived

    here = (node for node in nodes if node.link is not None and not node.is_excluded)
    return min(here, key=order, default=None)


def _names(names: Iterable[str]) -> str:
    return listed(sorted(names, key=natural))


def _taken(news: list[_T]) -> list[_T]:
    taken = news[:]
    news.clear()
    return taken
