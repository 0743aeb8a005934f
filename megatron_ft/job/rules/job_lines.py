"""Parts of lines that the leader tells users: a node and how it is, and what several rules say alike. Pure.

The place of a node is its group rank; its name is that of its host, empty where that isn't known.
"""

from __future__ import annotations

from megatron_ft.link.base.wording import counted

UNKNOWN_FAILURE = "a failure that was reported only to the lost coordinator"


def node(place: int, name: str) -> str:
    return f"node {place} ({name})" if name else f"node {place}"


def at(place: int, name: str, text: str) -> str:
    return f"{node(place, name)}: {text}"


def good(count: int, min_nodes: int) -> str:
    return f"{counted(count, 'healthy node')}, at least {min_nodes} required"


def did_not_come(more: int, *, seconds: float, aside: int) -> str:
    text = f"{counted(more, 'more node')} did not join within {seconds:g} s"
    return f"{text}; {counted(aside, 'node')} failing the health check" if aside else text


def too_few_left(*, left: int, min_nodes: int) -> str:
    return f"{counted(left, 'node')} left, at least {min_nodes} required"
