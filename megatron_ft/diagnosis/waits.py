"""How much ranks wait for each other, as launchers tell the coordinator, and what that says of slow ones."""

from __future__ import annotations

from megatron_ft.link.base.codec import Count, Cycle, Finite, Message, PartMessage, Rank

_WINDOW_S, _NODES_PER_S = 12.0, 100
"""Shortest window, and messages a second that a coordinator takes beside its others."""


def window_s(nodes: int) -> float:
    """Return the seconds for which looks are summed up and compared. Each node tells its own twice in them."""
    return max(_WINDOW_S, 2 * nodes / _NODES_PER_S)


class RankWaits(Message, frozen=True):
    """Looks at a rank's collectives since it has begun to train.

    Args:
        waiting: looks that found it in a collective.
        waits: those of them that followed one which didn't: at least so many different collectives were seen.
    """

    rank: Rank
    looks: Count
    waiting: Count
    waits: Count

    @property
    def share(self) -> float:
        """Share of its time that the rank spends in collectives."""
        return self.waiting / self.looks

    def since(self, before: RankWaits) -> RankWaits:
        """Return the looks after those ``before``; all of them if the rank has begun to count anew."""
        counts = self.looks - before.looks, self.waiting - before.waiting, self.waits - before.waits
        return self if min(counts) < 0 else RankWaits(self.rank, *counts)


class Waits(PartMessage, frozen=True):
    """Looks at the ranks of a node."""

    cycle: Cycle
    ranks: tuple[RankWaits, ...]


class RankLag(Message, frozen=True):
    """How much a rank holds the others back. All are shares of time.

    Args:
        node: name of its node.
        lag: so much more than this rank the others are in collectives, where they wait for it; the median of them.
        waits: it is in collectives itself.
    """

    rank: Rank
    node: str
    lag: Finite
    waits: Finite

    @property
    def text(self) -> str:
        waits = f"it spends {self.waits:.0%} of its time in collectives, the others {self.waits + self.lag:.0%}"
        return f"rank {self.rank} on {self.node} holds the others back: {waits}"


class Lags(PartMessage, frozen=True):
    """Result of the looks at all ranks, for the launcher that speaks for the job.

    Args:
        over_s: seconds that these looks cover.
        worst: ranks that lag, the worst first.
        slow: those of them that are named to the user.
    """

    cycle: Cycle
    over_s: Finite
    worst: tuple[RankLag, ...] = ()
    slow: tuple[Rank, ...] = ()

    @property
    def named(self) -> tuple[RankLag, ...]:
        return tuple(each for each in self.worst if each.rank in self.slow)
