"""What all nodes know of a cycle, folded from a log that all of them read in the same order. Pure.

Because the order is the same everywhere, so is everything that follows from it: the first entry after which the
policy sees an end decides, and every node finds the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.core.advance import Reached
from megatron_ft.core.restart_policy import NodeState, Outcome

__all__ = [
    "Entry",
    "JobView",
    "NodeReport",
    "ShutdownRequest",
    "gone",
    "hang_found",
    "hang_seen",
    "newcomers",
    "node_changed",
    "shutdown_requested",
]

Entry = Mapping[str, Any]
"""One JSON object of the log."""

Judge = Callable[[Collection[NodeState]], "Outcome | None"]

_FINAL = frozenset({NodeState.SUCCEEDED, NodeState.EXCLUDED})
"""What a node reaches by itself; that its launcher ends afterwards changes nothing."""


def node_changed(
    node: int,
    state: NodeState,
    *,
    name: str,
    text: str,
    kind: str = "",
    rank: int | None = None,
    follows: bool = False,
    reached: Reached | None = None,
) -> Entry:
    """A node has another state; ``text`` says why, ``kind`` (of cause) and ``rank`` where a rank did it.

    ``follows``: it did so only because it lost a rank of another node. ``reached``: how far its ranks had got.
    """
    return {
        "ev": "state",
        "node": node,
        "name": name,
        "state": state.value,
        "text": text,
        "kind": kind,
        "rank": rank,
        "follows": follows,
        "reached": reached,
    }


def newcomers(node: int, *, count: int) -> Entry:
    """That node has seen so many nodes waiting to join, for whom all are to meet again."""
    return {"ev": "newcomers", "node": node, "count": count}


def shutdown_requested(node: int, *, name: str, text: str) -> Entry:
    """A rank of that node asked for the end of the job."""
    return {"ev": "shutdown", "node": node, "name": name, "text": text}


def hang_seen(node: int) -> Entry:
    """A rank of that node was found hung; all are to tell what their ranks do, and that node decides who did it."""
    return {"ev": "hang", "node": node}


def hang_found(node: int, *, text: str, rank: int | None, iteration: int | None, detail: str, crashed: bool) -> Entry:
    """What that node has decided, as the fields of a cause. ``crashed``: the rank had raised, and didn't end."""
    fields = {"text": text, "rank": rank, "iteration": iteration, "detail": detail, "crashed": crashed}
    return {"ev": "finding", "node": node, **fields}


def gone(node: int) -> Entry:
    """That node has done everything that follows from the end of the cycle."""
    return {"ev": "gone", "node": node}


@dataclass(frozen=True)
class NodeReport:
    """One node."""

    state: NodeState = NodeState.HEALTHY
    name: str = ""
    text: str = ""
    kind: str = ""
    """The kind of the cause, as the event log has it; empty where no rank of the node is one."""
    rank: int | None = None
    """The rank that is the cause; None if none is known."""
    follows: bool = False
    """That rank failed because it had lost one of another node."""
    reached: Reached | None = None
    """How far its ranks had got, as far as that was told."""


@dataclass(frozen=True)
class ShutdownRequest:
    """Who asked for the end of the job, and in which words."""

    node: int
    name: str
    text: str


@dataclass(frozen=True)
class JobView:
    """All nodes by their group rank; ``outcome`` is the end of the cycle for all of them, once decided."""

    nodes: tuple[NodeReport, ...]
    shutdown: ShutdownRequest | None = None
    gone: frozenset[int] = frozenset()
    outcome: Outcome | None = None
    decided_by: int | None = None
    """The node whose entry was the one that ended the cycle."""
    hang: int | None = None
    """The node that was the first to find a rank hung."""
    finding: Entry | None = None
    """What it has decided of that (see ``hang_found``)."""
    newcomers: int = 0
    """Nodes that wait to join, where they ended the cycle."""
    reached: Reached | None = None
    """How far the node had got that ended the cycle."""

    def after(self, entry: Entry, judge: Judge) -> JobView:
        """The view after one more entry. Entries that say nothing (of an unknown node, of another version) don't."""
        node = entry.get("node")
        if not isinstance(node, int) or not 0 <= node < len(self.nodes):
            return self
        name, text = str(entry.get("name", "")), str(entry.get("text", ""))
        match entry.get("ev"):
            case "shutdown":
                view = replace(self, shutdown=self.shutdown or ShutdownRequest(node, name, text))
                return view._decided(Outcome.STOPPED, node)
            case "newcomers":
                if self.outcome is not None:
                    return self
                return replace(self._decided(Outcome.MEMBERSHIP, node), newcomers=int(entry.get("count", 0)))
            case "hang":
                return replace(self, hang=node) if self.hang is None else self
            case "finding":
                return replace(self, finding=_finding(entry)) if self.finding is None and self.hang == node else self
            case "gone":
                return replace(self, gone=self.gone | {node})
            case "state":
                return self._changed(node, _report(entry), judge)
        return self

    def makes_needless(self, entry: Entry) -> bool:
        """Whether an entry that isn't written yet needn't be: ranks fail everywhere when a cycle ends."""
        if entry.get("ev") == "state":
            is_cause = self.decided_by is not None and self.nodes[self.decided_by].follows and not entry.get("follows")
            return self.outcome is not None and entry["state"] == NodeState.UNHEALTHY.value and not is_cause
        return self.outcome is not None and entry.get("ev") == "newcomers"

    def first_failure(self) -> int | None:
        """The node that ended the cycle, or one whose end its own followed from, as far as that was told."""
        if self.decided_by is None or not self.nodes[self.decided_by].follows:
            return self.decided_by
        causes = (n for n, r in enumerate(self.nodes) if r.state is NodeState.UNHEALTHY and not r.follows)
        return next(causes, self.decided_by)

    def lacks_cause(self) -> bool:
        """Whether only a consequence of another node's failure is known."""
        decided_by = self.decided_by
        return decided_by is not None and self.nodes[decided_by].follows and self.first_failure() == decided_by

    def states(self) -> list[NodeState]:
        """By group rank."""
        return [report.state for report in self.nodes]

    def count(self, *states: NodeState) -> int:
        """How many nodes are in one of these states."""
        return sum(state in states for state in self.states())

    def all_gone(self) -> bool:
        """Whether nobody is to be waited for any more."""
        return len(self.gone) == len(self.nodes)

    def next_alive(self, node: int, count: int = 1) -> list[int]:
        """The ``count`` nodes after that one, in a ring of those that aren't gone; fewer if there are no more."""
        ring = itertools.chain(range(node + 1, len(self.nodes)), range(node))
        return list(itertools.islice((other for other in ring if other not in self.gone), count))

    def _changed(self, node: int, report: NodeReport, judge: Judge) -> JobView:
        absent = self.gone | {node} if report.state in (NodeState.LOST, NodeState.EXCLUDED) else self.gone
        view = replace(self, gone=absent)
        if self.nodes[node].state in _FINAL:
            return view
        view = replace(view, nodes=(*self.nodes[:node], report, *self.nodes[node + 1 :]))
        return view if self.outcome is not None else view._decided(judge(view.states()), node)

    def _decided(self, outcome: Outcome | None, node: int) -> JobView:
        if self.outcome is not None or outcome is None:
            return self
        return replace(self, outcome=outcome, decided_by=node, reached=self.nodes[node].reached)


def _finding(entry: Entry) -> Entry:
    rank, iteration = (value if type(value := entry.get(name)) is int else None for name in ("rank", "iteration"))
    return {
        "text": str(entry.get("text", "")),
        "detail": str(entry.get("detail", "")),
        "rank": rank,
        "iteration": iteration,
        "crashed": entry.get("crashed") is True,
    }


def _report(entry: Entry) -> NodeReport:
    rank, reached = entry.get("rank"), entry.get("reached")
    return NodeReport(
        state=NodeState(entry["state"]),
        name=str(entry.get("name", "")),
        text=str(entry.get("text", "")),
        kind=str(entry.get("kind", "")),
        rank=rank if type(rank) is int else None,
        follows=bool(entry.get("follows")),
        reached=None if reached is None else Reached(*map(int, reached)),
    )
