"""Lines for the user while a cycle runs or nodes meet: what they say, and when. Pure.

They come from the leader, because only it knows the state of all nodes. A line about the job is sent to all launchers,
and printed by one: the one at the lowest place whose node takes part and is connected. Times are seconds of the
leader's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.actions import Send
from megatron_ft.job.rules.job_cycle import GONE, GOOD, JobCycle
from megatron_ft.job.rules.messages import NodePhase, Tell
from megatron_ft.job.rules.next_cycle import Round
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import in_order
from megatron_ft.job.rules.restart_policy import Rules
from megatron_ft.link.base.hosts import natural
from megatron_ft.link.base.wording import counted, listed

_LONG_S, _AGAIN_FACTOR = 3.0, 10.0
"""Time after which nodes that meet are told what they wait for; and a factor, for the next times."""
_STANDBY_S = 1.0
"""Time between two looks for nodes on standby."""


class Announcements:
    """One leader's. ``nodes``: all launchers by instance."""

    def __init__(self, rules: Rules, nodes: Mapping[str, Node]) -> None:
        self._rules, self._nodes = rules, nodes
        self._since_s: float | None = None
        """Since when nodes wait for the next cycle; None: none does."""
        self._again_s = 0.0
        """When to say so next."""
        self._spares: set[Node] = set()
        """Launchers that were already reported as on standby."""
        self._spares_s = 0.0

    def due(self, cycle: JobCycle | None, meeting: Round | None, now_s: float) -> list[Send]:
        """Return the lines that are due. ``meeting``: the nodes that wait for the next cycle; None: none do."""
        lines: list[Send] = []
        if cycle is not None:
            first = printer(cycle, self._nodes.values()) if cycle.departures else None
            if first is not None and first.link is not None:
                lines += [Send([first.link], each) for each in cycle.departures]
                cycle.departures.clear()
            lines += self._changes(cycle)
            if cycle.outcome is None:
                lines += self._standby(cycle, now_s)
        return [*lines, *self._waiting(cycle, meeting, now_s)]

    def say(self, cycle: JobCycle | None, text: str) -> list[Send]:
        """Send a line about the whole job to all launchers."""
        first = printer(cycle, self._nodes.values())
        links = [node.link for node in self._nodes.values() if node.link is not None and not node.is_excluded]
        return [] if first is None else [Send(links, Tell(text, first.instance))]

    def _changes(self, cycle: JobCycle) -> list[Send]:
        """A line on nodes that have failed where the others go on, or that were lost after the one that ended it."""
        verdict, news = cycle.verdict, dict(cycle.news)
        if cycle.outcome is not None and (verdict is None or not cycle.restarts):
            return []
        cycle.news.clear()
        if verdict is not None:
            gone = {place: report for place, report in news.items() if report.state in GONE and place != verdict.node}
            return self.say(cycle, cycle.told(gone)) if gone else []
        bad = {place: report for place, report in news.items() if report.state not in GOOD}
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
        new = [node for node in spares if node not in self._spares]
        self._spares = set(spares)
        if not new:
            return []
        count = len(cycle.seats) - cycle.count(*GONE)
        running = "1 node runs" if count == 1 else f"{count} nodes run"
        own = Tell(f"on standby for the next restart: {running} without this one")
        text = f"{counted(len(new), 'node')} on standby for the next restart: {_names(new)}"
        return [Send([node.link for node in new if node.link is not None], own), *self.say(cycle, text)]

    def _waiting(self, cycle: JobCycle | None, meeting: Round | None, now_s: float) -> list[Send]:
        """Nodes wait for long: say for what, after 3 s, 30 s, 300 s."""
        if meeting is None or not meeting.ready:
            self._since_s = None
            return []
        if self._since_s is None:
            self._since_s, self._again_s = now_s, now_s + _LONG_S
        if now_s < self._again_s:
            return []
        self._again_s = self._since_s + (self._again_s - self._since_s) * _AGAIN_FACTOR
        return self.say(cycle, self._for_what(cycle, meeting, now_s))

    def _for_what(self, cycle: JobCycle | None, meeting: Round, now_s: float) -> str:
        """Return which nodes are here, which are missing (of the last cycle), and how many more are needed."""
        rules, nodes, ready = self._rules, self._nodes.values(), meeting.ready
        missing = [node for node in nodes if node.is_awaited]
        here, odd = len(ready), len(ready) - meeting.enough
        more = max(rules.min_nodes - meeting.enough, len(missing), 0)
        count = f"{here} of {here + more}" if more and not odd else f"{here}"
        parts = [f"{count} {'is' if here == 1 else 'are'} here: {_names(ready)}"]
        if odd:
            parts.append(f"{odd} of them not in a complete NVLink-domain segment (--ft-segment)")
        if cycle is not None:
            back = {node.name for node in ready if not cycle.is_seated(node)}  # on the same hosts
            gone = [cycle.seats[place].node for place in cycle.gone if cycle.seats[place].node.name not in back]
            parts += [f"missing since cycle {cycle.decision.cycle}: {_names(missing)}"] if missing else []
            parts += [f"lost in cycle {cycle.decision.cycle}: {_names(gone)}"] if gone else []
        if aside := [node for node in nodes if node.phase is NodePhase.ASIDE and not node.is_gone]:
            parts.append(f"failing their health check: {_names(aside)}")
        if more:
            return f"waiting for {counted(more, 'more node')} ({'; '.join(parts)})"
        within = f"for at most {meeting.until_s - now_s:.0f} s (--rdzv-conf last_call_timeout)"
        room = f"up to {rules.max_nodes - meeting.enough} more may join, {within}"
        return f"enough nodes to start; {room} ({'; '.join(parts)})"


def printer(cycle: JobCycle | None, nodes: Iterable[Node], *, may_be_away: bool = False) -> Node | None:
    """Return the launcher that prints the lines of the job; None if none is connected.

    ``may_be_away``: rather one of the cycle's that hears the line when it is back than one that had no part.
    """
    away: Node | None = None
    for node in [] if cycle is None else (seat.node for seat in cycle.seats if cycle.is_seated(seat.node)):
        if node.is_excluded:
            continue
        if node.link is not None:
            return node
        if may_be_away and away is None and node.name and not node.is_gone:
            away = node
    here = (node for node in nodes if node.link is not None and not node.is_excluded)
    return away or min(here, key=in_order, default=None)


def _names(nodes: Iterable[Node]) -> str:
    return listed(sorted((node.name or job_lines.node(node.place or 0, "") for node in nodes), key=natural))
