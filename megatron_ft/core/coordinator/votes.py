"""Voters: which have accepted a proposal, and which were lately at a coordinator that doesn't lead. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.job.decisions import Ballot, Decision

_LATELY_S = 10.0
"""A launcher in search is back at each address within this time, unless several hosts don't answer."""


@dataclass(slots=True)
class Proposal:
    """A decision that a majority is asked to accept.

    Args:
        members: the nodes that have a place in it, by place.
        waiting: nodes that must accept it in addition to the majority: all that have a place in it.
        is_new: this coordinator proposes it first; otherwise it may already have been decided.
        voters: places in the last decision of those that have accepted; founder: the launcher that began the job has.
    """

    ballot: Ballot
    decision: Decision
    members: dict[int, Node]
    waiting: set[Node]
    is_new: bool = True
    voters: set[int] = field(default_factory=set)
    founder: bool = False
    store: str = ""
    places: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {node: place for place, node in self.members.items()}

    def accepted(self, node: Node, voter: int | None, store: str | None) -> None:
        """A launcher has accepted it: the voter at that place, if it is one, with the ``store`` if it opens it."""
        if voter is not None:
            self.voters.add(voter)
        self.founder |= node.owns
        self.waiting.discard(node)
        self.store = self.store if store is None else store


class Visitors:
    """Voters that were at a coordinator which doesn't lead, since the last decision: in search, they may all wait here.

    Times are seconds of the coordinator's clock.
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}

    def are_here(self, places: Iterable[int], now_s: float) -> None:
        self._last_s.update(dict.fromkeys(places, now_s))

    def lately(self, now_s: float, left: Container[int]) -> list[int]:
        """Places of all that were here in the last 10 s, without those that have ``left`` the job."""
        last_s = self._last_s
        return [place for place, at_s in last_s.items() if now_s - at_s <= _LATELY_S and place not in left]
