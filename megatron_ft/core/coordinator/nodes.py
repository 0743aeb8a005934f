"""The launchers that are connected to the coordinator, as it knows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.core.job.decisions import (
    AcceptedProposal,
    AcceptorState,
    Assignment,
    Ballot,
    CoordinatorHost,
    Decision,
    Term,
)
from megatron_ft.core.job.messages import Hello, NodePhase, NodeStatus
from megatron_ft.core.job.restart_policy import JobProgress
from megatron_ft.core.memory.snapshots import Kept

GRACE_S = 0.3
"""A launcher whose connection has ended is dead, or back within this time."""
_MOST_NAMES = 100
_CANDIDATES = 8


@dataclass(slots=True, eq=False)
class Node:
    """One launcher, connected or missing for a moment only. Times are those of the coordinator's own clock."""

    instance: str
    name: str
    address: str
    rank: int | None
    owns: bool
    arrived: int
    link: int | None = None
    session: int = -1
    heard_s: float = 0.0
    gone_s: float = 0.0
    silent: bool = False
    was_reset: bool = False
    is_in_search: bool = False
    """Its connection has ended before it followed: it may be trying other addresses."""
    follows: bool = False
    phase: NodePhase = NodePhase.BUSY
    before: JobProgress = JobProgress()  # noqa: RUF009 - frozen
    """How far earlier lives of the job have got."""
    bad: str = ""
    """Why an earlier life of the job reported this host as bad; empty if none did."""
    memory: AcceptorState = AcceptorState()  # noqa: RUF009 - frozen
    standing: NodeStatus = NodeStatus()  # noqa: RUF009 - frozen
    domain: str = ""
    """NVLink domain, where segments of nodes must share one."""
    place: int | None = None
    """In the last decision."""
    votes: bool = False
    found_silent: CoordinatorHost | None = None
    """Node beside a coordinator that the launcher has found silent, from its `Hello`."""

    @staticmethod
    def of(hello: Hello, arrived: int) -> Node:
        """A launcher that says hello for the first time."""
        return Node(
            hello.instance,
            hello.name,
            hello.address,
            hello.rank,
            hello.owns,
            arrived,
            before=hello.before,
            domain=hello.domain,
            bad=hello.bad,
        )

    def connected(self, link: int, hello: Hello, now_s: float) -> None:
        """Take over a hello: connection, session, and everything the launcher remembers."""
        self.link, self.session, self.heard_s, self.owns = link, hello.session, now_s, hello.owns
        self.found_silent = hello.found_silent
        self.memory, self.standing, self.phase = hello.memory, hello.standing, hello.standing.phase

    def disconnected(self, now_s: float, *, silent: bool, reset: bool = False) -> None:
        """Its connection has ended; ``silent``: for another reason than the end of its process.

        ``reset``: something on the way may have ended it. A launcher that didn't follow yet may have ended it itself,
        because the answer took too long, and be trying other addresses now.
        """
        self.link, self.silent, self.gone_s = None, silent, now_s
        self.was_reset, self.is_in_search = reset, not self.follows

    def ended(self, now_s: float) -> None:
        self.gone_s, self.was_reset, self.is_in_search = now_s - GRACE_S, False, False

    @property
    def may_return(self) -> bool:
        """Whether it may be alive, though its connection was closed."""
        return self.was_reset or self.is_in_search

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s

    def address_of(self, port: int) -> str:
        """Return the address of another port of this launcher's host; empty if it isn't known."""
        return f"{self.address.rpartition(':')[0]}:{port}" if self.address else ""

    @property
    def kept(self) -> Kept:
        """Return what its keeper can restore, and serve to others."""
        kept = self.standing.kept
        return kept if self.address else replace(kept, port=0)

    def enter(self, phase: NodePhase) -> None:
        self.phase = phase

    def ready(self, kept: Kept) -> None:
        """Note that the node is ready, and what its keeper can restore."""
        self.phase = NodePhase.READY
        self.stock_taken(kept)

    def stock_taken(self, kept: Kept) -> None:
        """Note what its keeper can restore, as long as no cycle has begun."""
        if self.phase is NodePhase.READY and kept != self.standing.kept:
            self.standing = replace(self.standing, kept=kept)

    def begin(self, cycle: int) -> None:
        self.phase, self.standing = NodePhase.RUNNING, NodeStatus(NodePhase.RUNNING, cycle)

    def follow(self, term: Term, accepted: AcceptedProposal | None) -> bool:
        """Note that the node follows the term, with its accepted proposal. Return False if it followed before."""
        followed, self.follows = self.follows, True
        self.memory = AcceptorState(term, self.memory.decided, accepted)
        return not followed

    def unfollow(self) -> None:
        self.follows = False

    def accept(self, ballot: Ballot, held: Assignment) -> None:
        self.memory = self.memory.accept(ballot, held)

    def learn(self, decided: Assignment) -> None:
        self.memory = self.memory.learn(decided)

    def seat(self, decision: Decision | None) -> None:
        """Find its place and its vote in the last decision; None: there is none yet."""
        held = None if decision is None else self.held(decision)
        self.place = None if held is None else held.place
        self.votes = held is not None and held.votes

    def awaited_until_s(self, *, limit_s: float, missing_s: float, search_s: float, slept_s: float) -> float:
        """When it counts as lost, if its connection has ended and it isn't back by then.

        Args:
            limit_s: seconds without a message after which a node is silent. A kernel may give a connection up before:
                packets to the node were lost, while those from it came.
            missing_s: seconds to wait for a launcher that comes back here at once.
            search_s: seconds to wait for one that has given up waiting for an answer here, and looks elsewhere first.
            slept_s: until when the coordinator itself didn't answer.
        """
        if self.silent:
            return max(self.gone_s, self.heard_s + limit_s)
        if self.has_exited(slept_s):
            return self.gone_s + GRACE_S
        from_s = max(self.gone_s, slept_s)  # it couldn't follow here any sooner
        return from_s + (search_s if self.is_in_search else missing_s)

    def has_exited(self, slept_s: float) -> bool:
        """Whether that its connection has ended means that its process has.

        If the coordinator itself has just taken over or been paused (until ``slept_s``), the launcher may have waited
        for an answer in vain, and be trying other addresses now.
        """
        return not self.silent and not self.may_return and self.gone_s > slept_s + GRACE_S

    def held(self, decision: Decision) -> Assignment | None:
        return self.memory.held(decision, self.instance)


def names_of(members: Mapping[int, Node]) -> tuple[str, ...]:
    """The names of their hosts, by place; none of many, which would make every message long."""
    return tuple(members[place].name for place in sorted(members)) if len(members) <= _MOST_NAMES else ()


def candidates(nodes: Mapping[int, Node]) -> tuple[str, ...]:
    """Return addresses of substitute coordinators: the first of those nodes, by place."""
    first = (nodes[place] for place in sorted(nodes)[: 2 * _CANDIDATES])
    return tuple(node.address for node in first if node.address)[:_CANDIDATES]


def silent_hosts(voters: Iterable[Node], size: int) -> dict[int, str]:
    """Places, and their hosts' names, from whose host more than half of ``size`` voters got no packet any more."""
    found = Counter(node.found_silent for node in voters if node.follows)
    return {beside.place: beside.name for beside, count in found.items() if beside and 2 * count > size}


def instances_of(members: Mapping[int, Node]) -> tuple[str, ...]:
    """The instances of their launchers, by place, "" where no member has it; none of many, as with the names."""
    if not members or len(members) > _MOST_NAMES:
        return ()
    return tuple(members[place].instance if place in members else "" for place in range(max(members) + 1))
