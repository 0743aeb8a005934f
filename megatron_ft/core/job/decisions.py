"""Decisions of the nodes of a job, one after the other, and the majority each needs. Pure.

Decisions are numbered. The voters of decision ``n - 1`` decide on number ``n``, by single-decree Paxos: a coordinator
first gets a majority to follow its term (and hears what they have accepted), then a majority to accept its proposal.
Whatever the number, two coordinators can't both succeed, because two majorities have a node in common.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from msgspec.structs import replace

from megatron_ft.core.codec import Int, Message
from megatron_ft.core.job.restart_policy import JobProgress
from megatron_ft.core.memory.snapshots import Restore

Term = tuple[Int, str]
"""A count, and the coordinator's identifier: no two coordinators ever have the same. The greater one wins."""
Ballot = tuple[Int, str, Int]
"""A term, and how many things its coordinator has proposed in it."""


class DecisionKind(enum.Enum):
    """Kind of a decision."""

    CYCLE = "cycle"
    """These nodes train together, in this order."""
    ROLL = "roll"
    """Continue the same cycle (or wait for its successor) without votes of some nodes, which are lost."""
    END = "end"
    """The job ends."""


class Decision(Message, frozen=True):
    """One. Each node knows its own place, and needs no other's.

    Args:
        number: of decisions, from 0.
        value: the ballot in which it was proposed first, which tells it from others of the same number.
        world: so many nodes train in ``cycle``; their places are 0 to ``world - 1``.
        size: so many of them vote on the next decision.
        head: the place whose node breaks the tie where exactly half of them agree.
        restarts: used by the job before this cycle began.
        code: for the end: the launchers' exit code, with the reason in ``text``.
        began: the value of the decision that began the cycle, if it isn't this one. (Several may have been proposed.)
        founded: the value of the job's first decision, if it isn't this one: it tells two jobs of one name apart.
        back: names of nodes that were lost once, and are ready for this cycle.
        names: of the hosts in the cycle, by place, for a coordinator that takes over; empty in a job of many nodes.
        voters: the launchers (instances) that vote on the next decision, each at the index that is its place, for a
            coordinator that proposes this again; "" at other places, and empty in a job of many nodes.
        shift: places by which the ranks of each node are rotated: the process with LOCAL_RANK i runs the rank that
            the one with i + shift would run otherwise.
        restore: the snapshot in memory that the ranks of ``cycle`` go on from; None: none.
    """

    number: Int
    value: Ballot
    kind: DecisionKind
    cycle: Int
    world: Int
    size: Int
    head: Int
    restarts: Int = 0
    advance: JobProgress = JobProgress()
    code: Int = 0
    text: str = ""
    began: Ballot | None = None
    founded: Ballot | None = None
    back: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    voters: tuple[str, ...] = ()
    shift: Int = 0
    restore: Restore | None = None

    def __hash__(self) -> int:
        return hash(self.value)

    @property
    def origin(self) -> Ballot:
        """The value of the decision that began the cycle."""
        return self.began or self.value

    @property
    def founding(self) -> Ballot:
        return self.founded or self.value

    def is_made_by(self, instances: Collection[str]) -> bool:
        """Whether these launchers could make what comes next, as far as its voters are named."""
        if not self.voters:
            return 2 * len(instances) > self.size
        return is_quorum([place for place, each in enumerate(self.voters) if each in instances], self)


class CoordinatorHost(Message, frozen=True):
    """The node on a coordinator's own host, whose launcher has started it; ``name`` is the host's."""

    place: Int
    name: str


class Assignment(Message, frozen=True):
    """A decision as one node has it. ``place`` is None for a node that doesn't take part."""

    decision: Decision
    place: Int | None = None
    votes: bool = False
    store: str = ""
    """Store in which the ranks of the cycle meet."""

    def starts_ranks(self, cycle: int) -> bool:
        """Whether a node whose last cycle was ``cycle`` starts ranks by it; by a `ROLL` if it missed the cycle."""
        return self.place is not None and self.decision.kind is not DecisionKind.END and self.decision.cycle > cycle


class AcceptedProposal(Message, frozen=True):
    """A proposal that a node has accepted, and doesn't know to be decided."""

    ballot: Ballot
    held: Assignment


class AcceptorState(Message, frozen=True):
    """State that a launcher must remember, and sends to a coordinator that takes over."""

    promised: Term = (-1, "")
    """Least term of a coordinator that the launcher follows."""
    decided: Assignment | None = None
    accepted: AcceptedProposal | None = None

    @property
    def number(self) -> int:
        """Number of the last known decision; -1 without one."""
        return -1 if self.decided is None else self.decided.decision.number

    @property
    def is_empty(self) -> bool:
        """True if the launcher knows of no job: no decision was accepted or learned."""
        return self.decided is None and self.accepted is None

    def may_accept(self, ballot: Ballot, decision: Decision) -> bool:
        """Whether a proposal is neither of an earlier coordinator nor older than what is accepted or decided."""
        is_stale = self.accepted is not None and self.accepted.ballot > ballot
        return ballot[:2] >= self.promised and decision.number > self.number and not is_stale

    def follow(self, term: Term) -> AcceptorState:
        return replace(self, promised=term)

    def accept(self, ballot: Ballot, held: Assignment) -> AcceptorState:
        return AcceptorState(self.promised, self.decided, AcceptedProposal(ballot, held))

    def learn(self, held: Assignment) -> AcceptorState:
        return AcceptorState(self.promised, held)

    def held(self, decision: Decision, instance: str) -> Assignment | None:
        """A decision as the launcher ``instance`` has it; None if it has no part in it, as far as it can be known.

        A node that missed a decision about its cycle, and isn't named there, still has its place, but no vote on what
        comes next.
        """
        decided, accepted = self.decided, None if self.accepted is None else self.accepted.held
        if decided is not None and decided.decision.value == decision.value:
            return decided
        if accepted is not None and accepted.decision.value == decision.value:
            return accepted
        if instance in decision.voters:
            return Assignment(decision, decision.voters.index(instance), votes=True)
        for held in (decided, accepted):
            if held is not None and held.decision.origin == decision.origin:
                return replace(held, decision=decision, votes=False)
        return None


def is_quorum(places: Collection[int], decision: Decision, left: Collection[int] = ()) -> bool:
    """Whether these voters can decide what comes after ``decision``: more than half, or half of them with its head.

    ``left``: voters that have left. They never vote again, and don't count.
    """
    size = decision.size - len(left)
    here = len(places)
    return 2 * here > size or (2 * here == size > 0 and decision.head in places)
