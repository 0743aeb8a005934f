"""Every line, and part of one, that the coordinator tells users, from facts. Pure.

The place of a node is its group rank; its name is that of its host, empty where that isn't known.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ANOTHER_JOB",
    "LAUNCHER_ENDED",
    "OTHER_OPTIONS",
    "UNKNOWN_FAILURE",
    "at",
    "bad",
    "did_not_come",
    "finished_without",
    "leaves",
    "listed",
    "node",
    "nodes_waiting",
    "on",
    "silent",
    "too_few_healthy",
    "too_few_left",
]

ANOTHER_JOB = "another job meets at this address: give each job its own --rdzv-endpoint"
OTHER_OPTIONS = "the options of this launcher differ from those of the others"
UNKNOWN_FAILURE = "a failure that only the lost coordinator knew of"
LAUNCHER_ENDED = "its launcher has ended"
_SHOWN = 8
"""So many nodes are listed by name in one line."""


# -- parts ----------------------------------------------------------------------------------------------------


def node(place: int, name: str) -> str:
    """A node."""
    return f"node {place} ({name})" if name else f"node {place}"


def at(place: int, name: str, text: str) -> str:
    """What failed on another node: for the place of the cause."""
    return f"{node(place, name)}: {text}"


def on(place: int, name: str, text: str) -> str:
    """What was asked for on another node: for the place of the cause."""
    return f"on {node(place, name)} {text}"


def bad(place: int, name: str, state: str, text: str) -> str:
    """A node that isn't good any more. ``state`` as in "unhealthy"."""
    return f"{node(place, name)} is {state}: {text}"


def leaves(place: int, name: str, text: str) -> str:
    """A node that is left out."""
    return f"{node(place, name)} leaves the job: {text}"


def listed(parts: Iterable[str]) -> str:
    """Some nodes, a part of the line for each; of many, the first ones."""
    told = list(parts)
    more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return "; ".join([*told[:_SHOWN], *more])


def silent(seconds: float) -> str:
    """Why a node is lost."""
    return f"its launcher was not heard of for {seconds:.0f} s"


# -- why a cycle or the job ended -----------------------------------------------------------------------------


def too_few_healthy(*, good: int, min_nodes: int, told: str) -> str:
    """Why a cycle ended for all nodes. ``told``: which aren't, as ``listed``."""
    return f"{_good(good, min_nodes)}: {told}"


def nodes_waiting(count: int) -> str:
    """Why a healthy cycle ends."""
    return f"{_count(count, 'node')} waiting to join"


def finished_without(*, finished: int, nodes: int, told: str) -> str:
    """The job has succeeded on some of its nodes. ``told``: what is wrong with the others, as ``listed``."""
    return f"the job finished on {finished} of {_count(nodes, 'node')}: {told}"


def did_not_come(more: int, *, seconds: float) -> str:
    """Why the job ends: a round waits for nodes that it needs, but not for ever."""
    return f"{_count(more, 'more node')} didn't come in {seconds:g} s"


def too_few_left(*, left: int, min_nodes: int) -> str:
    """A node has left, and the others can't go on."""
    return f"{left} of at least {min_nodes} nodes left"


def _good(good: int, min_nodes: int) -> str:
    return f"{_count(good, 'good node')} of at least {min_nodes}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
