"""The coordinator of a job, without I/O: it takes the launchers' messages, and returns what to send to which.

``handle`` takes one event. ``settle`` decides what follows: call it after each batch of events, if
``needs_settling``, and when ``alarm_s`` is over. Times are seconds of any clock that doesn't go back. A coordinator
keeps nothing on disk: the launchers can tell another one all that it needs.
"""

from __future__ import annotations

import functools

from megatron_ft.core.coordinator.admission import Admission
from megatron_ft.core.coordinator.consensus import Consensus
from megatron_ft.core.coordinator.job_cycle import JobCycle
from megatron_ft.core.coordinator.job_phases import CoordinatorMove, JobState
from megatron_ft.core.coordinator.next_cycle import NextCycle, nodes_left
from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.coordinator.notices import Notices
from megatron_ft.core.coordinator.slow_ranks import SlowRanks
from megatron_ft.core.coordinator.votes import Proposal
from megatron_ft.core.diagnosis.waits import Waits
from megatron_ft.core.job import job_lines
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.actions import Broken, CoordinatorEffect, CoordinatorEvent, Drop, Judged, Quit, Send
from megatron_ft.core.job.coordinator_locator import LONGEST_SKIP_S
from megatron_ft.core.job.decisions import Assignment, Ballot, Decision, DecisionKind
from megatron_ft.core.job.liveness import OwnClock, beat_s, lost_s
from megatron_ft.core.job.member import MOVED_S
from megatron_ft.core.job.restart_policy import Outcome
from megatron_ft.core.memory.snapshots import KeeperPort, Saved
from megatron_ft.learning.leader_part import LeaderLearning
from megatron_ft.learning.messages import Intervals, Killed, Milestone

_LINGER_S = 5.0
"""The coordinator stays so long after the end of the job, to tell launchers that don't know of it yet."""
_SEARCH_S = 6.0
"""Added to the time for which nodes in search are waited for: some stay at a coordinator that doesn't lead, for up to
6.5 s, and the first call here after that may get no answer in time."""
_SHOWN_NAME = 200
_SETTLES_NOTHING = (m.Beat, Saved, Waits)


class Coordinator:
    """See above. No two have the same ``name``; one that ``founds`` may begin a job that has none yet.

    ``elsewhere``: address of the coordinator that its launcher follows; launchers that know of no job are sent there.
    ``defined``: the job of its launcher; the first hello defines the job of a coordinator without one.
    """

    def __init__(
        self,
        name: str,
        *,
        founds: bool,
        owned: bool = True,
        elsewhere: str = "",
        defined: m.JobDefinition | None = None,
        now_s: float = 0.0,
    ) -> None:
        self._out: list[CoordinatorEffect] = []
        self._consensus = Consensus(name, founds=founds, owned=owned, emit=self._out.append, decided=self._decided)
        self._clock = OwnClock(now_s)
        self._admission = Admission(elsewhere, defined, now_s=self._clock.now_s)
        self._nodes: dict[str, Node] = {}
        self._links: dict[int, Node] = {}
        self._absent: dict[str, Node] = {}
        """Launchers whose connection has just ended; they may come back."""
        self._arrivals = 0
        self._sweep_s = 0.0
        self._alarms: list[float] = []
        self._state = JobState()
        self._cycle: JobCycle | None = None
        self._learning = LeaderLearning()
        """The learning of ``_cycle``."""
        self._slow_ranks = SlowRanks(-1, 0)
        self._next_cycle = NextCycle(self._state, self._consensus, self._nodes)
        self._notices = Notices(self._state, self._nodes)
        self._over_s = 0.0
        """When this coordinator ends at the latest, once the job is over."""
        self._end: m.End | None = None
        """End of the cycle: the same for all launchers that are sent it before the next ``settle``."""
        self._lingers = False
        """Nodes of the last cycle haven't heard that the job has ended, and may yet come."""
        self._is_orphan = False
        self._began_s = 0.0
        """When this coordinator learned of the job's first cycle."""
        self._rival: Ballot | None = None
        """Job that another coordinator of this name leads, by its first decision."""
        self._rival_s = 0.0
        self.needs_settling = False
        """An event was handled that ``settle`` may have to act on."""

    @property
    def alarm_s(self) -> float:
        """When ``settle`` is to be called at the latest, by the caller's clock."""
        return self._clock.callers_s(min([self._sweep_s, *self._alarms]))

    @property
    def leads(self) -> bool:
        return self._consensus.leads

    @property
    def is_over(self) -> bool:
        return self._state.is_over

    @property
    def job(self) -> str:
        """Name of the job, cut to what fits into a handshake; empty as long as there is none."""
        return self._admission.job[:_SHOWN_NAME]

    # -- messages of the launchers ----------------------------------------------------------------------------

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorEffect]:
        """Take an event; returns what to do at once."""
        self._clock.set(now_s)
        self.needs_settling |= isinstance(event, Broken) or not isinstance(event.message, _SETTLES_NOTHING)
        if isinstance(event, Broken):
            node = self._links.get(event.link)
            if node is not None:
                self._gone(node, silent=event.silent, reset=event.reset)
        elif isinstance(event.message, m.Hello):
            self._hello(event.link, event.message)
        elif isinstance(event.message, m.Moved):
            self._moved(event.link, event.message)
        elif (node := self._links.get(event.link)) is not None:
            node.heard(self._clock.now_s)
            self._heard(node, event.link, event.message)
        return self._take()

    def _take(self) -> list[CoordinatorEffect]:
        if not self._out:
            return []
        taken, self._out[:] = self._out[:], []
        return taken

    def _hello(self, link: int, hello: m.Hello) -> None:
        node = self._nodes.get(hello.instance)
        turned_away = self._admission.answer(hello, now_s=self._clock.now_s)
        if turned_away is not None or (node is not None and hello.session < node.session):
            self._out += [] if turned_away is None else [Send([link], turned_away)]
            self._out += [] if isinstance(turned_away, m.Wait) else [Drop(link)]
            return
        if node is None:
            self._arrivals += 1
            node = Node.of(hello, self._arrivals)
        elif node.link is not None:
            self._out.append(Drop(node.link))
            self._gone(node, silent=False)
        self._absent.pop(hello.instance, None)
        self._nodes[hello.instance] = self._links[link] = node
        node.connected(link, hello, self._clock.now_s)
        self._next_cycle.connected(node)
        self._consensus.arrived(node, self._nodes.values())
        self._seat(node)
        if (former := self._nodes.get(hello.former_instance)) is not None:
            self._left_elsewhere(former, hello.standing.report)
        if self._state.is_over:
            self._out.append(Send([link], self._consensus.news()))

    def _moved(self, link: int, moved: m.Moved) -> None:
        self._out.append(Drop(link))
        decision = self._consensus.decision
        is_behind = decision is not None and moved.founding == decision.founding and moved.number > decision.number
        if self._consensus.leads and decision is not None and not is_behind:
            self._compare(moved, decision)
        else:
            self._admission.moved(moved, self._clock.now_s)

    def _compare(self, moved: m.Moved, decision: Decision) -> None:
        """Tell another coordinator that leads a job of this name about this one.

        Of two jobs the younger ends. In the same job the coordinator that missed decisions gives up its lead.
        """
        cycle, founding = self._cycle, moved.founding
        if cycle is None or founding is None or moved.job != self._admission.job:
            return
        if (founding, moved.number) == (decision.founding, decision.number):
            return
        speaker = next((node for _, node in sorted(self._consensus.voters().items()) if node.link is not None), None)
        if speaker is None or speaker.link is None:
            return
        now_s, is_news = self._clock.now_s, self._rival != founding
        if not is_news and now_s < self._rival_s + MOVED_S:
            return
        self._rival, self._rival_s = founding, now_s
        if founding == decision.founding:
            pass
        elif (moved.number, moved.age_s) > (decision.number, now_s - self._began_s):
            cycle.asked_to_end(None, job_lines.rival_is_older(moved.address, moved.number))
        elif is_news:
            self._out.append(Send([speaker.link], m.Tell(job_lines.rival_is_younger(moved.address))))
        self._out.append(Send([speaker.link], m.Rival(moved.address)))

    def _heard(self, node: Node, link: int, message: m.FromMember) -> None:
        match message:
            case m.Beat():
                self._out.append(Send([link], message))
            case m.Follow(term, accepted):
                if self._consensus.followed(node, term, accepted):
                    self._bring_up_to_date(node, link)  # first: by a later decision it forgets an earlier one
                    self._consensus.ask_also(node)
            case m.Newer(term):
                self._consensus.newer(term)
            case m.Accept(ballot, store):
                self._consensus.accepted(node, ballot, store)
            case m.Ready(kept):
                node.ready(kept)
            case m.StockTaken(kept):
                node.stock_taken(kept)
            case m.NodeUnfit():
                node.enter(m.NodePhase.ASIDE)
            case m.Away():
                self._out.append(Drop(link))
                self._gone(node, silent=False, reset=True)
            case m.Goodbye():
                self._goodbye(node, link, message)
            case _:
                self._heard_of_cycle(node, message)

    def _heard_of_cycle(self, node: Node, message: m.FromMember) -> None:
        if (cycle := self._cycle) is None:
            return
        if isinstance(message, m.Shutdown):
            cycle.asked_to_end(node.place, message.text)
        if (place := cycle.place_of(node)) is None:
            return
        if isinstance(message, m.Report):
            cycle.changed(place, message)
        elif isinstance(message, Waits):
            self._slow_ranks.heard(node.name, message, self._clock.now_s)
        elif isinstance(message, m.Hang) and message.cycle == cycle.decision.cycle:
            asked = cycle.hang(place, message, self._nodes.values(), self._clock.now_s)
            question = m.DiagnoseHang(message.cycle, message.passive, looks=message.decides)
            self._out += [Send(asked, question)] if asked else []
        elif isinstance(message, Saved | m.Restored | KeeperPort):
            self._heard_of_snapshot(cycle, place, node, message)
        elif isinstance(message, m.RankSnapshots) and message.cycle == cycle.decision.cycle:
            cycle.noted(place, message)
        elif isinstance(message, Milestone | Intervals | Killed):
            for_others = self._learning.hear(place, message)
            links = [link for link in cycle.links(self._nodes.values()).values() if link != node.link]
            self._out += [Send(links, for_others)] if for_others is not None and links else []

    def _heard_of_snapshot(
        self, cycle: JobCycle, place: int, node: Node, message: Saved | m.Restored | KeeperPort
    ) -> None:
        if isinstance(message, KeeperPort):
            address = node.address_of(message.port)
            if address and message.cycle == cycle.decision.cycle:
                self._serves_copies(cycle, place, address)
        elif isinstance(message, m.Restored):
            if cycle.snapshots.restored(place, message, cycle.decision.restore):
                self._out += self._notices.restored(cycle)
        else:
            self._tell_of_snapshot(cycle, cycle.snapshots.saved(place, message.key))

    def _tell_of_snapshot(self, cycle: JobCycle, answer: m.OfSnapshots | None) -> None:
        if answer is not None and cycle.outcome is None:
            links = list(cycle.links(self._nodes.values()).values())
            self._out += [Send(links, each) for each in cycle.snapshots.with_complete(answer)]

    def _serves_copies(self, cycle: JobCycle, place: int, address: str) -> None:
        """Tell the nodes that copy their snapshots to that one, or take its copies, where to."""
        for at, message in cycle.copies.serves(place, address):
            to = self._consensus.voters().get(at)
            if to is not None and to.link is not None:
                self._out.append(Send([to.link], message))

    def _goodbye(self, node: Node, link: int, goodbye: m.Goodbye) -> None:
        cycle = self._cycle
        if cycle is not None and (place := cycle.place_of(node)) is not None:
            self._consensus.leaves(node)
            cycle.farewell(place, goodbye, self._clock.now_s)
        self._gone(node, silent=False)
        del self._nodes[node.instance], self._absent[node.instance]
        left = nodes_left(cycle, self._nodes, self._arrivals) if goodbye.excluded else 0
        few = "" if cycle is None or not goodbye.excluded else cycle.too_few(left)
        self._out.append(Send([link], m.Stay() if left and not few else m.Dismiss(1 if few else goodbye.code, few)))
        if few and cycle is not None:
            cycle.give_up_round(place, f"{goodbye.text}; {few}")
        self._next_cycle.node_lost(self._clock.now_s)

    def _left_elsewhere(self, node: Node, report: m.Report | None) -> None:
        """Take a node for excluded whose goodbye went to another coordinator. What it voted there counts."""
        cycle = self._cycle
        if cycle is None or (place := cycle.place_of(node)) is None:
            return
        if node.link is not None:
            self._out.append(Drop(node.link))
            self._gone(node, silent=False)
        text = "" if report is None else report.cause.text
        cycle.farewell(place, m.Goodbye(text, excluded=True), self._clock.now_s)
        del self._nodes[node.instance], self._absent[node.instance]
        self._next_cycle.node_lost(self._clock.now_s)

    def _gone(self, node: Node, *, silent: bool, reset: bool = False) -> None:
        assert node.link is not None
        del self._links[node.link]
        node.disconnected(self._clock.now_s, silent=silent, reset=reset)
        self._absent[node.instance] = node
        self._consensus.went(node)
        if self._cycle is not None and (place := self._cycle.place_of(node)) is not None:
            self._learning.lost(place)

    def _seat(self, node: Node) -> None:
        """Give a node its place in the last cycle back, and take over the state that it reports."""
        cycle, standing = self._cycle, node.standing
        if cycle is None:
            return
        if standing.shutdown:
            cycle.asked_to_end(node.place, standing.shutdown)
        if node.place is None or not cycle.occupied(node.place, node.instance, node.name):
            return
        self._next_cycle.restore_place(node)
        cycle.restored(node.place, standing, self._clock.now_s)
        if standing.complete is not None:
            self._tell_of_snapshot(cycle, cycle.snapshots.was_complete(node.place, standing.complete))
        for key in standing.saved:
            self._heard_of_snapshot(cycle, node.place, node, Saved(key))
        if standing.restored and standing.cycle == cycle.decision.cycle:
            cycle.snapshots.restored(node.place, None, cycle.decision.restore)
        if standing.keeper_port:
            self._heard_of_snapshot(cycle, node.place, node, KeeperPort(standing.cycle, standing.keeper_port))
        self._out += [
            Send([node.link], question) for question in cycle.questions_to(node.place) if node.link is not None
        ]

    def _decided(self, proposal: Proposal | None) -> None:
        """There is a new last decision: by this coordinator's own proposal, or one that a launcher has reported."""
        decision, rules = self._consensus.decision, self._admission.rules
        assert decision is not None
        assert rules is not None
        if self._cycle is None:
            self._began_s = self._clock.now_s
        if decision.kind is DecisionKind.END:
            self._state.move(CoordinatorMove.END)
            self._admission.job_ended(self._clock.now_s)
            self._over_s = self._clock.now_s + _LINGER_S
            self._lingers = proposal is None or len(proposal.members) < decision.world
        self._next_cycle.decided()
        self._end, cycle = None, self._cycle
        if cycle is not None and cycle.decision.cycle == decision.cycle and decision.kind is not DecisionKind.CYCLE:
            cycle.follow_decision(decision)
            return
        if decision.kind is not DecisionKind.END:
            self._state.move(CoordinatorMove.CYCLE)
        cycle = self._cycle = JobCycle(rules, decision, self._state)
        self._learning = self._learning.begin(decision.cycle)
        self._slow_ranks = SlowRanks(decision.cycle, decision.world)
        known = {} if proposal is None else proposal.members
        for place in range(decision.world):
            if (member := known.get(place)) is None or member.link is None:
                cycle.missing(place, self._clock.now_s)
            else:
                cycle.occupied(place, member.instance, member.name)
                member.enter(m.NodePhase.RUNNING)
        self._next_cycle.cycle_began(decision, proposal)
        if proposal is not None and proposal.is_new and self._next_cycle.without_snapshot:
            self._out += self._notices.without_snapshot(cycle, self._next_cycle.without_snapshot)
        if proposal is None or not proposal.is_new:
            for node in self._nodes.values():
                if node.link is not None:
                    self._seat(node)
                if node.follows and node.place is not None and decision.kind is DecisionKind.CYCLE:
                    node.enter(m.NodePhase.RUNNING)  # it is told so now

    # -- what follows -----------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[CoordinatorEffect]:
        """Do what follows from all events so far."""
        self.needs_settling, self._end, self._alarms = False, None, []
        self._clock.set(now_s)
        self._look_for_lost()
        now, admission = self._clock.now_s, self._admission
        if self._consensus.advance(self._nodes.values(), now, admission.other_lead(now)):
            self._took_over()
        if self._consensus.leads:
            patient = self._clock.now_s < (self._next_cycle.lost_s or -60.0) + lost_s(len(self._nodes))
            if self._consensus.commit(self._nodes.values(), patient=patient) is not None:
                self._alarms.append(self._clock.now_s)
            self._conclude()
            self._propose_due()
            self._learn()
            self._look_for_slow_ranks()
        elif self._consensus.is_deserted and not self._state.is_over:
            self._dismiss_standby()
        self._alarms += [self._over_s] if self._state.is_over else []
        if self._is_needless():
            self._out.append(Quit())
        return self._take()

    def _is_needless(self) -> bool:
        if self._state.is_over:
            return self._clock.now_s >= self._over_s or not (self._links or self._lingers)
        is_alone = self._consensus.decision is None or not self._links
        return is_alone and (self._is_orphan or self._consensus.is_deserted)

    def orphaned(self) -> None:
        """The launcher that has started this coordinator has ended: the coordinator stays as long as others need it."""
        self._is_orphan = self.needs_settling = True
        for node in [node for node in self._nodes.values() if node.owns]:
            self._consensus.leaves(node)  # before it votes elsewhere a launcher kills its coordinator
            if self._cycle is not None and self._cycle.is_seated(node):
                self._cycle.lose(node.place or 0, job_lines.LAUNCHER_ENDED)
            if node.link is not None:
                self._out.append(Drop(node.link))
                self._gone(node, silent=False)
            node.ended(self._clock.now_s)

    def _dismiss_standby(self) -> None:
        """All nodes that vote have left: dismiss the nodes on standby, which alone can't go on."""
        for link, node in list(self._links.items()):
            if node.memory.accepted is None and self._admission.rules is not None:
                self._out.append(Send([link], m.Dismiss(self._admission.rules.try_again_code, job_lines.ALL_HAVE_LEFT)))
                self._gone(node, silent=True)

    def _look_for_lost(self) -> None:
        limit_s, missing_s, search_s = lost_s(len(self._nodes)), self._missing_s, self._search_s
        if self._clock.now_s >= self._sweep_s:
            self._sweep_s = self._clock.now_s + beat_s(len(self._nodes))
            for link, node in list(self._links.items()):
                if self._clock.now_s - node.heard_s >= limit_s:
                    self._out.append(Drop(link))
                    self._gone(node, silent=True)
        for node in list(self._absent.values()):
            until_s = node.awaited_until_s(
                limit_s=limit_s, missing_s=missing_s, search_s=search_s, slept_s=self._clock.slept_s
            )
            if self._clock.now_s < until_s:
                self._alarms.append(until_s)
                continue
            del self._absent[node.instance], self._nodes[node.instance]
            cycle = self._cycle
            if cycle is None or (place := cycle.place_of(node)) is None:
                continue
            if not self._consensus.leads:
                cycle.missing(place, self._clock.now_s)
                continue
            cycle.lose(place, self._why_gone(node))
            self._next_cycle.node_lost(self._clock.now_s)

    def _why_gone(self, node: Node) -> str:
        if node.has_exited(self._clock.slept_s):
            return job_lines.LAUNCHER_ENDED
        now_s = self._clock.now_s
        return job_lines.reset(now_s - node.gone_s) if node.was_reset else job_lines.silent(now_s - node.heard_s)

    @property
    def _missing_s(self) -> float:
        """How long nodes are waited for that aren't connected."""
        limit_s, paused_s = lost_s(len(self._nodes)), self._clock.now_s - self._clock.paused_s
        # a launcher that called while this process was paused got no answer, and tries this address again later
        return limit_s + (LONGEST_SKIP_S if paused_s < limit_s + LONGEST_SKIP_S else 0.0)

    @property
    def _search_s(self) -> float:
        """How long nodes are waited for that may be at a coordinator which doesn't lead."""
        return max(self._missing_s, lost_s(len(self._nodes)) + _SEARCH_S)

    def _took_over(self) -> None:
        """Lead from now on: a node that isn't connected is lost after the same time as a silent one."""
        cycle = self._cycle
        self._next_cycle.node_lost(self._clock.now_s)
        if cycle is not None:
            self._next_cycle.took_over(self._clock.now_s)
            self._clock.mark_unanswered()
            for place, seat in enumerate(cycle.seats):
                if seat.instance not in self._nodes:
                    cycle.missing(place, self._clock.now_s)

    def _bring_up_to_date(self, node: Node, link: int) -> None:
        """Send a node that follows from now on what it may have missed."""
        decision, cycle = self._consensus.decision, self._cycle
        if decision is None or cycle is None:
            return
        if cycle.place_of(node) is None:
            self._seat(node)  # it has just said that it has accepted what was decided
        seated = cycle.is_seated(node)
        if node.memory.number < decision.number:
            held = node.held(decision) or Assignment(decision)
            node.learn(held)
            self._out.append(Send([link], self._consensus.news()))
            if held.starts_ranks(node.standing.cycle):  # whether it is lost or not
                node.begin(decision.cycle)
        if not seated:
            waits = node.standing.ended is not None and node.standing.verdict is None  # for a verdict that it won't get
            if node.phase is m.NodePhase.RUNNING or (waits and node.phase is m.NodePhase.BUSY):
                node.enter(m.NodePhase.BUSY)
                text = cycle.why_lost(node)
                self._out.append(Send([link], m.End(node.standing.cycle, Outcome.MEMBERSHIP, True, True, text)))
            return
        if cycle.outcome is not None:
            self._end_for([node], cycle)
        self._out += [Send([link], answer) for answer in cycle.snapshots.missed(node.standing.saved)]
        if cycle.verdict is not None and node.standing.verdict != cycle.verdict:
            self._out.append(Send([link], cycle.verdict))
        if cycle.diagnosis is not None and cycle.outcome is None:
            self._out.append(Send([link], m.DiagnoseHang(decision.cycle)))

    def _conclude(self) -> None:
        """Find out whether the cycle is over, and why, and send it."""
        cycle, rules = self._cycle, self._admission.rules
        if cycle is None or rules is None:
            return
        cycle.lose_missing(self._search_s, self._clock.now_s, self._consensus.voters().values())
        nodes = self._nodes.values() if rules.at_once else ()
        ready = sum(node.phase is m.NodePhase.READY and node.follows for node in nodes)
        room = rules.max_nodes - cycle.decision.world + cycle.lost
        self._out += cycle.reviewed(self._clock.now_s, self._nodes.values())
        is_news = cycle.take_news()
        if cycle.conclude(self._clock.now_s, joining=max(0, min(ready, room))) or is_news:
            if cycle.outcome is not None:
                self._end_for(list(self._nodes.values()), cycle)
            if cycle.verdict is not None:
                self._out.append(Send(list(self._links), cycle.verdict))
        if cycle.outcome is not None and cycle.verdict is None:
            left = nodes_left(cycle, self._nodes, self._arrivals)
            has_absent = any(cycle.place_of(node) is not None for node in self._absent.values())
            verdict = cycle.judge(self._clock.now_s, nodes_left=left, has_absent=has_absent)
            if verdict is not None:
                self._out += [Judged(verdict), Send(list(self._links), verdict)]
                self._next_cycle.bad_nodes.record_verdict(cycle)
        if cycle.alarm_s is not None:
            self._alarms.append(cycle.alarm_s)

    def _learn(self) -> None:
        """Begin or end a survey. After all decisions, which it must not delay."""
        cycle = self._cycle
        if cycle is not None:
            links = functools.cache(lambda: cycle.links(self._nodes.values()))
            due = self._learning.tick(self._clock.now_s, lambda: links().keys(), lambda: cycle.healthy)
            self._out += [Send([*links().values()], message) for message in due if links()]
            self._alarms += [] if self._learning.due_s is None else [self._learning.due_s]

    def _look_for_slow_ranks(self) -> None:
        """Tell the launcher that speaks for the job which ranks hold the others back."""
        cycle = self._cycle
        if cycle is None or cycle.outcome is not None:
            return
        lags = self._slow_ranks.take(self._clock.now_s)
        if lags is not None and (links := cycle.links(self._nodes.values())):
            self._out.append(Send([links[min(links)]], lags))
        self._alarms += [] if self._slow_ranks.alarm_s is None else [self._slow_ranks.alarm_s]

    def _propose_due(self) -> None:
        if self._admission.rules is None or self._state.is_over:
            return
        rules, now_s, has_absent = self._admission.rules, self._clock.now_s, bool(self._absent)
        self._next_cycle.propose_due(rules, self._cycle, arrivals=self._arrivals, has_absent=has_absent, now_s=now_s)
        self._out += self._notices.tell(rules, self._cycle, self._consensus.proposal, now_s=now_s)
        self._alarms += [at_s for at_s in (self._next_cycle.alarm_s, self._notices.alarm_s) if at_s is not None]

    def _end_for(self, nodes: list[Node], cycle: JobCycle) -> None:
        running = [node for node in nodes if node.phase is m.NodePhase.RUNNING and node.link is not None]
        for node in running:
            node.enter(m.NodePhase.BUSY)
        links = [node.link for node in running if node.link is not None]
        if links:
            self._end = self._end or cycle.end(nodes_left=nodes_left(cycle, self._nodes, self._arrivals))
            self._out.append(Send(links, self._end))
