"""A decision that the launchers are asked to accept, and who has."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.job.decisions import Ballot, Decision

__all__ = ["Proposal"]


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
