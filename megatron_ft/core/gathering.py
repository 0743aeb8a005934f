"""A round in which the nodes of the last cycle meet again: who is dead, whom to wait for, how often to look. Pure.

Nodes are known here by whatever the rendezvous knows them by. Times are seconds of one's own monotonic clock:
nothing here compares the clocks of two machines.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

__all__ = ["LAST_CALL_S", "Gathering", "Seen", "Verdict", "contention_s", "first_delay_s", "poll_delay_s"]

LAST_CALL_S = 1.0
"""So long a round that has fewer or other nodes than the last one is open for more."""

_MAX_POLL_S = 2.0
"""As torch does it, with its delay of 1 s and its cache of 1 s."""
_MAX_IDLE_POLL_S = 0.5


def poll_delay_s(nodes: int, waited_s: float) -> float:
    """How long to wait between two looks at the rendezvous.

    All nodes look at one store, and what they read grows with their number; a round that has waited for long for
    somebody isn't in a hurry any more.
    """
    least = min(_MAX_POLL_S, 0.01 + 0.002 * nodes)
    return max(least, min(_MAX_IDLE_POLL_S, 0.02 * waited_s))


def first_delay_s(nodes: int) -> float:
    """Within this time the nodes enter a round, each at random: all hear of its need at the same moment."""
    return min(_MAX_POLL_S, 0.002 * (nodes - 1))


def contention_s(nodes: int, failures: int) -> float:
    """Within this time, at random, a node tries again that was not the only one to write, ``failures`` times now.

    The state is written as a whole, and only by who has read it as it is: with many writers at once nobody gets on.
    """
    return min(_MAX_POLL_S, 0.0005 * (nodes - 1) * 2.0 ** min(failures - 1, 5))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of the rendezvous as this node has just read it."""

    me: Hashable
    round: int
    complete: bool
    participants: frozenset[Hashable]
    waiting: frozenset[Hashable]
    """Nodes that wait for the next round; they take part as soon as it is open."""
    beats: Mapping[Hashable, object]
    """The last sign of life of each node, in whatever unit: only whether it changes counts."""

    def stands_by(self, last_number: int | None) -> bool:
        """Whether others run a cycle without this node, which took part in round ``last_number`` (None: in none).

        Nodes leave their last round one after the other, and until the last one has it still looks complete.
        """
        return self.complete and self.me not in self.participants and self.round != last_number


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do about it."""

    dead: frozenset[Hashable] = frozenset()
    """Nodes to be taken out of the rendezvous."""
    ends_last_call: bool = False
    """Nobody else is to be waited for."""


@dataclass
class Gathering:
    """One round, for a node that took part in the last one.

    Args:
        last_round: the nodes of the last cycle with their group ranks; empty for a node's first round, of which
            it can say nothing.
        last_number: the number of that round; None for a node's first.
        min_nodes: so many nodes a round needs.
        max_nodes: with so many it is complete.
    """

    last_round: Mapping[Hashable, int]
    last_number: int | None
    min_nodes: int
    max_nodes: int
    _beats: dict[Hashable, object] = field(default_factory=dict)
    _settled_s: float | None = None

    def look(self, seen: Seen, *, absent: Collection[int], now_s: float) -> Verdict:
        """``absent`` are the group ranks of nodes of the last cycle that are lost or have left."""
        dead = self._dead(seen, absent)
        return Verdict(dead=dead, ends_last_call=self._ends_last_call(seen, seen.participants - dead, absent, now_s))

    def missing(self, seen: Seen, *, absent: Collection[int] = ()) -> list[Hashable]:
        """Nodes of the last cycle that aren't there (yet), by group rank."""
        here = seen.waiting | (frozenset() if self._is_last_round(seen) else seen.participants)
        found = [(number, node) for node, number in self.last_round.items() if node not in here]
        return [node for number, node in sorted(found, key=lambda item: item[0]) if number not in absent]

    def _dead(self, seen: Seen, absent: Collection[int]) -> frozenset[Hashable]:
        if seen.complete and not self._is_last_round(seen):
            return frozenset()  # they have met: what was known of the last cycle says nothing any more
        dead = set()
        for node, number in self.last_round.items():
            beat = seen.beats.get(node)
            if number not in absent or node == seen.me or beat is None:
                continue
            # one that was only frozen comes back and says so; then it isn't sent away again
            if self._beats.setdefault(node, beat) == beat:
                dead.add(node)
        return frozenset(dead)

    def _ends_last_call(
        self, seen: Seen, participants: frozenset[Hashable], absent: Collection[int], now_s: float
    ) -> bool:
        expected = {node for node, number in self.last_round.items() if number not in absent}
        open_ = not seen.complete and seen.me in participants and len(participants) >= self.min_nodes
        if not self.last_round or not open_ or seen.waiting or not expected <= participants:
            self._settled_s = None
            return False
        if participants == self.last_round.keys():
            return True
        if self._settled_s is None:
            self._settled_s = now_s
        return now_s - self._settled_s >= LAST_CALL_S

    def _is_last_round(self, seen: Seen) -> bool:
        return seen.complete and seen.round == self.last_number
