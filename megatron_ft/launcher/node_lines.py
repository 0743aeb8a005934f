"""Lines that ``ft_launcher`` prints of other nodes, from facts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.job_view import JobView, NodeReport
from megatron_ft.core.restart_policy import NodeState

__all__ = [
    "ENDED_WHILE_ASIDE",
    "GOOD",
    "excluded",
    "failed",
    "kept_as_host",
    "lost_between",
    "lost_sight",
    "node",
    "node_changed",
    "others_stand_by",
    "shut_down",
    "succeeded_without",
    "too_few_healthy",
    "too_few_left",
    "waiting_for_nodes",
    "waiting_for_others",
    "standing_by",
]

GOOD = (NodeState.HEALTHY, NodeState.SUCCEEDED)
"""What counts for the minimum."""
ENDED_WHILE_ASIDE = "it stood aside"
"""Why a node wasn't needed: for the end of the line."""
_SHOWN = 8


def node(number: int, name: str) -> str:
    """A node by its group rank and its host's name."""
    return f"node {number} ({name})" if name else f"node {number}"


def node_changed(*, cycle: int, number: int, view: JobView, min_nodes: int) -> str:
    """A node is no good any more, and the others go on."""
    report = view.nodes[number]
    return (
        f"cycle {cycle}: {node(number, report.name)} is {report.state.value}: {report.text}; "
        f"going on with {_good(view)} of at least {min_nodes}"
    )


def too_few_healthy(*, view: JobView, min_nodes: int) -> str:
    """Why a cycle ended for all nodes: for the place of the cause."""
    bad = [(number, report) for number, report in enumerate(view.nodes) if report.state not in GOOD]
    told = "; ".join(f"{node(number, r.name)} is {r.state.value}: {r.text}" for number, r in bad)
    return f"{_good(view)} of at least {min_nodes}: {told}"


def too_few_left(*, left: int, min_nodes: int) -> str:
    """A node has left, and the others can't go on."""
    return f"{left} of at least {min_nodes} nodes left"


def shut_down(*, number: int, name: str, text: str) -> str:
    """A rank of another node asked for the end of the job: for the place of the cause."""
    return f"on {node(number, name)} {text}"


def excluded(view: JobView) -> str | None:
    """Which nodes left the job; None if none did."""
    left = [(n, report) for n, report in enumerate(view.nodes) if report.state is NodeState.EXCLUDED]
    return "; ".join(f"{node(number, r.name)} leaves the job: {r.text}" for number, r in left) or None


def failed(*, number: int, report: NodeReport) -> str:
    """What ended the cycle on another node: for the place of the cause."""
    return f"{node(number, report.name)}: {report.text}"


def lost_between(*, number: int, report: NodeReport, are_enough: bool) -> str:
    """A node is missed while the others meet again; ``are_enough``: without it."""
    follows = "meet without it" if are_enough else "are too few, and wait for it or for one in its place"
    return f"{node(number, report.name)} is lost: {report.text}; the other nodes {follows}"


def waiting_for_nodes(
    *, here: Sequence[str], more: int, missing: Sequence[str] = (), lost: Sequence[str] = (), cycle: int | None = None
) -> str:
    """A round of the rendezvous takes long.

    ``more`` nodes are needed (0: none, but some may yet come); of the last cycle, ``cycle``, nodes are ``missing``
    that live, as far as is known, or ``lost``.
    """
    parts = [f"{len(here)} {'of ' + str(len(here) + more) + ' ' if more else ''}{_are(len(here))} here"]
    if here:
        parts[0] += f": {_names(here)}"
    if missing:
        parts.append(f"missing since cycle {cycle}: {_names(missing)}")
    if lost:
        parts.append(f"lost in cycle {cycle}: {_names(lost)}")
    needed = f"{more} more node{'' if more == 1 else 's'}" if more else "more nodes to come"
    return f"waiting for {needed} ({'; '.join(parts)})"


def standing_by(running: int) -> str:
    """The others train, without this node."""
    nodes = "1 node runs" if running == 1 else f"{running} nodes run"
    return f"standing by for the next restart: {nodes} without this one"


def others_stand_by(names: Sequence[str]) -> str:
    """Nodes wait to join, and the ones that run aren't disturbed."""
    nodes = "1 node stands" if len(names) == 1 else f"{len(names)} nodes stand"
    return f"{nodes} by for the next restart: {_names(names)}"


def lost_sight(text: str) -> str:
    """The others gave this node up: for the place of the cause."""
    return f"the other nodes took this one for lost ({text})"


def waiting_for_others(*, cycle: int, others: int) -> str:
    """This node has finished, and the job has not."""
    nodes = "1 other node" if others == 1 else f"{others} other nodes"
    return f"cycle {cycle}: all ranks of this node finished; waiting for {nodes}"


def succeeded_without(view: JobView) -> str | None:
    """Which nodes didn't finish in a job that did; None if all did."""
    bad = [(n, r) for n, r in enumerate(view.nodes) if r.state is not NodeState.SUCCEEDED]
    if not bad:
        return None
    told = "; ".join(f"{node(number, r.name)} is {r.state.value}: {r.text}" for number, r in bad)
    return f"the job finished on {len(view.nodes) - len(bad)} of {len(view.nodes)} nodes: {told}"


def kept_as_host() -> str:
    """A node that leaves, but whose launcher the others need."""
    return "this node hosts the rendezvous: its launcher stays, without ranks, as long as the other nodes need it"


def _good(view: JobView) -> str:
    number = view.count(*GOOD)
    return "1 good node" if number == 1 else f"{number} good nodes"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
