"""The coordinator's half of the consensus: whether it leads, and which of its proposals are decided. Pure.

It knows the last decision that any of its nodes knows, leads while enough voters of that one follow its term, and may
then propose the next one. It first proposes again what a lost coordinator may already have decided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from megatron_ft.core.coordinator.admission import OtherLead
from megatron_ft.core.coordinator.nodes import Node, candidates, instances_of, names_of
from megatron_ft.core.coordinator.votes import Proposal, Visitors
from megatron_ft.core.job.actions import CoordinatorEffect, Decided, Send
from megatron_ft.core.job.decisions import (
    AcceptedProposal,
    Assignment,
    Ballot,
    CoordinatorHost,
    Decision,
    DecisionKind,
    Term,
    is_quorum,
)
from megatron_ft.core.job.messages import Commit, Lead, Propose, Wait
from megatron_ft.core.job.restart_policy import JobProgress
from megatron_ft.core.memory.snapshots import Restore


class Consensus:
    """``name``: no two coordinators have the same; ``founds``: it may make a job's first decision.

    ``owned``: a launcher has started it. ``emit`` takes effects, ``decided`` is called for each new last decision.
    """

    def __init__(
        self,
        name: str,
        *,
        founds: bool,
        owned: bool,
        emit: Callable[[CoordinatorEffect], None],
        decided: Callable[[Proposal | None], None],
    ) -> None:
        self.decision: Decision | None = None
        self.store = ""
        self.leads = False
        self.term: Term | None = None
        self.proposal: Proposal | None = None
        self.left: set[int] = set()
        """Places of voters that have sent `Goodbye`."""
        self._name, self._founds, self._owned = name, founds, owned
        self._emit, self._decided = emit, decided
        self._here: dict[int, Node] = {}
        self._candidates: tuple[str, ...] = ()
        self._following: set[int] = set()
        self._had: dict[int, Ballot] = {}
        """Values (`Decision.value`) that following voters had accepted before, by place."""
        self._owner: Node | None = None
        self._seen: Term = (-1, "")
        self._attempt, self._has_asked = 0, False
        self._unasked: list[Node] = []
        self._untold: list[Node] = []
        self._visitors, self._told = Visitors(), (False, "")
        self._unsure: set[Node] = set()
        """Connected nodes that have accepted a first decision of another coordinator, which may have been made."""

    # -- who is here ------------------------------------------------------------------------------------------

    def arrived(self, node: Node, everybody: Iterable[Node]) -> None:
        node.unfollow()
        self._seen = max(self._seen, node.memory.promised)
        decided = node.memory.decided
        if decided is not None and decided.decision.number > (-1 if self.decision is None else self.decision.number):
            self.leads, self.proposal = False, None
            nodes = list(everybody)
            self._adopt(decided.decision, decided.store, nodes)
            self._follow_anew(nodes)  # and hear, each, what it has missed
            self._decided(None)
        accepted = node.memory.accepted
        if self.decision is None and accepted is not None and accepted.ballot[:2] != self.term:
            self.leads, self.proposal = False, None
            self._unsure.add(node)
        self._place(node)
        if node.owns:
            self._owner = node
        self._unasked.append(node)
        self._untold.append(node)

    def leaves(self, node: Node) -> None:
        """A launcher is known to vote never again: it has said so, or its process has ended.

        What it has accepted may have been decided with its vote by another coordinator: then it counts.
        """
        accepted, decision = node.memory.accepted, self.decision
        if accepted is not None and decision is not None and accepted.held.decision.number > decision.number:
            return
        if node.votes and node.place is not None:
            self.left.add(node.place)

    def went(self, node: Node) -> None:
        node.unfollow()
        self._unsure.discard(node)
        if node.place is not None and self._here.get(node.place) is node:
            del self._here[node.place]
            self._following.discard(node.place)
        self._owner = None if self._owner is node else self._owner
        proposal = self.proposal
        if proposal is not None and proposal.is_new and (node in proposal.waiting or node in proposal.places):
            self.proposal = None  # with another attempt it can be proposed without that node
        elif proposal is not None:
            proposal.waiting.discard(node)  # an older one may be decided, whether the node comes back or not

    def followed(self, node: Node, term: Term, accepted: AcceptedProposal | None) -> bool:
        """A launcher follows, and reports what it has accepted. True if that is for this term, and new."""
        if term != self.term:
            return False
        if accepted is not None and accepted.held.decision.number <= node.memory.number:
            accepted = None  # the commit was sent while this came
        if not node.follow(term, accepted):
            return False
        self._place(node)
        if node.place is not None and self._here.get(node.place) is node:
            self._following.add(node.place)
            if node.memory.accepted is not None:
                self._had[node.place] = node.memory.accepted.held.decision.value
        return True

    def ask_also(self, node: Node) -> None:
        """Send an open proposal that may already be decided to a launcher that follows from now on."""
        if self.proposal is not None and not self.proposal.is_new:
            self._ask_again(self.proposal, [node])

    def newer(self, term: Term) -> None:
        self._seen = max(self._seen, term)

    @property
    def is_deserted(self) -> bool:
        """All voters of the last decision have left: the job can't continue."""
        return self.decision is not None and len(self.left) >= self.decision.size

    @property
    def _beside(self) -> CoordinatorHost | None:
        owner = self._owner
        return None if owner is None or owner.place is None else CoordinatorHost(owner.place, owner.name)

    def voters(self) -> dict[int, Node]:
        return self._here

    def _place(self, node: Node) -> None:
        node.seat(self.decision)
        if node.place is not None and node.votes and node.place not in self.left:
            self._here[node.place] = node

    def _adopt(self, decision: Decision, store: str, everybody: Iterable[Node]) -> None:
        same_cycle = self.decision is not None and self.decision.cycle == decision.cycle
        self.decision, self.store = decision, store or (self.store if same_cycle else "")
        self._here.clear()
        self._following.clear()
        self._had.clear()
        self.left, self._candidates = set(), ()
        self._visitors = Visitors()
        self._unsure.clear()
        for node in everybody:
            if node.link is not None:
                self._place(node)
                if node.place is not None and node.votes and node.follows:
                    self._following.add(node.place)

    # -- leading ----------------------------------------------------------------------------------------------

    def advance(self, everybody: Iterable[Node], now_s: float, other: OtherLead) -> bool:
        """Ask launchers to follow, and take or give up the lead; returns True if the lead has just been taken.

        Launchers that wait here are told of the ``other`` coordinator. If that knows later decisions, this one doesn't
        lead: its nodes would be lost there meanwhile.
        """
        is_elsewhere = bool(other.address) and other.number > (-1 if self.decision is None else self.decision.number)
        enough = self._suffices(self._here.keys(), self._owner is not None)
        if is_elsewhere or not enough or not self._may_begin(everybody):
            self.leads, self.proposal = False, None
            if self._has_asked:  # its followers are to know that they have no leader any more
                self._has_asked = False
                self._follow_anew(everybody)
                self._untold = list(self._unasked)
            self._tell_waiting(everybody, now_s, other)
            return False
        if self.term is None or self._seen > self.term:
            self.leads, self.proposal = False, None
            self.term, self._attempt = (self._seen[0] + 1, self._name), 0
            self._seen = self.term
            self._follow_anew(everybody)
        links = [node.link for node in self._unasked if node.link is not None]
        if links:
            self._has_asked = True
            self._emit(Send(links, Lead(self.term, self._beside)))
        self._unasked = []
        before = self.leads
        enough = self._suffices(self._following, self._owner is not None and self._owner.follows)
        # all voters that are here, before it begins: the more of them tell what they accepted, the less is unknown
        self.leads = enough and (before or len(self._following) == len(self._here))
        if not self.leads:
            self.proposal = None
        elif not before:
            self._untold, self._candidates = [], candidates(self._here)
            self._recover(everybody)
        elif (old := self.proposal) is not None and not old.is_new and not self._may_be_decided(old.decision):
            self.proposal = None  # more voters have come, and they hadn't accepted it
        return self.leads and not before

    def _follow_anew(self, everybody: Iterable[Node]) -> None:
        """No launcher follows any more before it has been asked again."""
        self._following.clear()
        self._had.clear()
        self._unasked = [node for node in everybody if node.link is not None]
        for node in self._unasked:
            node.unfollow()

    def _suffices(self, places: Collection[int], owner: bool) -> bool:
        if self.decision is None:
            return self._founds and (owner or not self._owned)
        return is_quorum(places, self.decision, self.left)

    def _may_begin(self, nodes: Iterable[Node]) -> bool:
        """Whether it may lead without a decision: if the first one may have been made, most of its nodes must be here.

        The others may have trained since, and ended, while a launcher that knows only the proposal was stopped.
        """
        accepted = [node.memory.accepted for node in self._unsure if node.memory.accepted is not None]
        last = max(accepted, key=lambda each: each.ballot, default=None)
        return last is None or last.held.decision.is_made_by({node.instance for node in nodes if node.link is not None})

    def _tell_waiting(self, everybody: Iterable[Node], now_s: float, other: OtherLead) -> None:
        if other.address:
            self._visitors = Visitors()  # all are sent there
        self._visitors.are_here(self._here, now_s)
        before, self._told = (
            self._told,
            (self._suffices(self._visitors.lately(now_s, self.left), owner=False), other.address),
        )
        if self._told != before and any(self._told):
            self._untold = list(everybody)
        links = [node.link for node in self._untold if node.link is not None]
        self._untold = []
        if links:
            here, size = len(self._here), 0 if self.decision is None else self.decision.size
            soon = (here > 1 and 4 * here >= size > 0) or (self.decision is None and self._founds)
            age_s = now_s - other.since_s if other.address else 0.0
            self._emit(Send(links, Wait(here, size, soon, *self._told, age_s)))

    # -- proposing --------------------------------------------------------------------------------------------

    def propose(
        self,
        kind: DecisionKind,
        members: dict[int, Node],
        others: Iterable[Node],
        *,
        cycle: int,
        world: int,
        restarts: int,
        advance: JobProgress,
        code: int = 0,
        text: str = "",
        back: Sequence[str] = (),
        rotates: bool = False,
        restore: Restore | None = None,
    ) -> None:
        """Ask for a decision.

        ``members`` have places in it, and are all waited for; ``others`` only vote on it, or only receive it.
        ``rotates``: the ranks of each node are rotated by one more place than in the last cycle; ``restore``: what they
        go on from.
        """
        assert self.leads, "only who leads proposes"
        voters = sorted(members) if kind is not DecisionKind.END else sorted(self._here)
        decision = Decision(
            number=0 if self.decision is None else self.decision.number + 1,
            value=self._ballot(),
            kind=kind,
            cycle=cycle,
            world=world,
            size=len(voters),
            head=voters[0] if voters else 0,
            restarts=restarts,
            advance=advance,
            code=code,
            text=text,
            back=tuple(back),
            names=names_of(members) if kind is DecisionKind.CYCLE or self.decision is None else self.decision.names,
            began=None if kind is DecisionKind.CYCLE or self.decision is None else self.decision.origin,
            founded=None if self.decision is None else self.decision.founding,
            voters=instances_of(members) if kind is not DecisionKind.END else (),
            shift=(0 if self.decision is None else self.decision.shift) + rotates,
            restore=restore,
        )
        founder = [self._owner] if self._owner is not None and self.decision is None else []
        everybody = list(dict.fromkeys([*members.values(), *others, *founder]))
        self._ask(Proposal(decision.value, decision, dict(members), set(members.values())), everybody)

    def accepted(self, node: Node, ballot: Ballot, store: str) -> None:
        """A launcher has accepted a proposal."""
        proposal = self.proposal
        if proposal is None or proposal.ballot != ballot or not node.follows:
            return
        held = self._held(proposal, node)
        node.accept(ballot, held)
        voter = node.place if node.place is not None and self._here.get(node.place) is node else None
        proposal.accepted(node, voter, store if held.place == 0 else None)

    def commit(self, everybody: Iterable[Node], *, patient: bool) -> Proposal | None:
        """Make the proposal a decision, if it has been accepted.

        ``patient``: voters that aren't here may yet come, and show that an older one can't have been made.
        """
        proposal = self.proposal
        if patient and proposal is not None and not proposal.is_new and self.decision is not None:
            if len(self._following) + len(self.left) < self.decision.size:
                return None
        if proposal is None or proposal.waiting or not self._suffices(proposal.voters, proposal.founder):
            return None
        self.proposal = None
        nodes = list(everybody)
        for node in nodes:
            held = node.held(proposal.decision)
            if held is not None and node.follows:
                node.learn(held)
        decision = proposal.decision
        self._adopt(decision, proposal.store, nodes)
        self._candidates = candidates(self._here)
        self._emit(
            Decided(
                Assignment(decision, store=self.store),
                tuple(n.instance if (n := proposal.members.get(place)) else "" for place in range(decision.world)),
            )
        )
        links = [node.link for node in nodes if node.link is not None and node.follows]
        self._emit(Send(links, self.news()))
        self._decided(proposal)
        return proposal

    def news(self) -> Commit:
        """The last decision, for a node that doesn't know it; with one list of candidates, they look in one order."""
        assert self.decision is not None
        return Commit(self.decision, self.store, self._candidates or candidates(self._here), self._beside)

    def _recover(self, everybody: Iterable[Node]) -> None:
        """Propose again what may have been decided: the last that any voter has accepted."""
        number = 0 if self.decision is None else self.decision.number + 1
        nodes = [node for node in everybody if node.link is not None and node.follows]
        found = [
            accepted
            for node in self._unsure or nodes  # what others may have made goes before its own
            if (accepted := node.memory.accepted) is not None and accepted.held.decision.number == number
        ]
        last = max(found, key=lambda accepted: accepted.ballot, default=None)
        if last is not None and self._may_be_decided(last.held.decision):  # else its coordinator died while it asked
            self._ask_again(Proposal(self._ballot(), last.held.decision, {}, set(), is_new=False), nodes)

    def _ask_again(self, proposal: Proposal, nodes: list[Node]) -> None:
        """Propose once more what they may have accepted already."""
        for node in nodes:
            held = node.held(proposal.decision)
            if held is not None and held.place is not None:
                proposal.members[held.place], proposal.places[node] = node, held.place
                if held.place == 0 and proposal.decision.kind is DecisionKind.CYCLE:
                    proposal.waiting.add(node)  # it alone knows where the store is
        self._ask(proposal, nodes)

    def _may_be_decided(self, decision: Decision) -> bool:
        """Whether enough voters can have accepted it: all that aren't here, and those here that say so."""
        if self.decision is None:
            return True
        having = sum(self._had.get(place) == decision.value for place in self._following)
        return 2 * (having + self.decision.size - len(self._following)) >= self.decision.size

    def _ballot(self) -> Ballot:
        assert self.term is not None
        self._attempt += 1
        return (*self.term, self._attempt)

    def _ask(self, proposal: Proposal, nodes: Iterable[Node]) -> None:
        self.proposal = proposal
        about = proposal.ballot, proposal.decision
        addresses = candidates(proposal.members)
        outside: list[int] = []
        for node in nodes:
            if node.link is None:
                continue
            place, votes = proposal.places.get(node), True
            if place is None or not proposal.is_new:  # of thousands most have a place in a new one
                held = self._held(proposal, node)
                place, votes = held.place, held.votes
            if place is None:
                outside.append(node.link)
            else:
                self._emit(Send([node.link], Propose(*about, place, votes, addresses)))
        if outside:
            self._emit(Send(outside, Propose(*about, None, False, addresses)))

    def _held(self, proposal: Proposal, node: Node) -> Assignment:
        place = proposal.places.get(node)
        if place is not None and proposal.is_new:
            return Assignment(proposal.decision, place, votes=True, store=self.store)
        return node.held(proposal.decision) or Assignment(proposal.decision)
