"""The leader of a job, without I/O: it takes the launchers' messages, and returns what to send to which.

``handle`` takes one event. ``settle`` decides what follows: call it after each batch of events, if
``needs_settling``, and when ``alarm_s`` is over. Times are seconds of any clock that doesn't go back.

There is one leader at a time, because there is one lock: the port of the job's endpoint, or a key in etcd. A leader
keeps nothing on disk. Its launcher hands the record of the last decision to the next one, and the launchers tell all
else in their hellos. A leader without a record founds the job, or takes over the newest decision that any launcher
knows. In etcd the next leader finds the decision; it may be one of an earlier run, whose launchers are all gone.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ft.core.codec import PartMessage
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.actions import (
    BeginLife,
    Broken,
    CoordinatorEffect,
    CoordinatorEvent,
    Drop,
    Judged,
    Quit,
    Send,
)
from megatron_ft.job.rules.admission import is_of_next, knows, refusal
from megatron_ft.job.rules.announcements import Announcements
from megatron_ft.job.rules.decider import Decider, Plan
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord, FormerDecision
from megatron_ft.job.rules.give_up_policy import HOLDER_STAYS_S
from megatron_ft.job.rules.job_cycle import NEW_LEADER_S, JobCycle, printer
from megatron_ft.job.rules.leader_part import LeaderPart, Line, ToNodes
from megatron_ft.job.rules.liveness import FINISHED_S, OwnClock, beat_s, lost_s
from megatron_ft.job.rules.next_cycle import NextCycle, nodes_left
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import NodeState, Outcome

FOUNDING_S = 8.0
"""Seconds for which a leader without a record decides nothing unless MAX launchers that know of no decision have come:
others may know one."""
FORMER_S = 15.0
"""Seconds for which a leader waits for a launcher that knows of the last decision in etcd."""
_LINGER_S = 5.0
"""Seconds for which the leader stays after the job's end for launchers of excluded nodes, or in place of lost ones."""
_SHOWN_NAME = 200


class Coordinator:
    """See above. No two have the same ``name``. ``defined``: the job of the launcher that has started it.

    ``record``: that of the last decision, from an earlier leader; None if there is none.
    ``epoch``, ``former``: in etcd, instead; 0: the lock is the endpoint's port.
    """

    def __init__(
        self,
        name: str,
        defined: m.JobDefinition,
        *,
        record: DecisionRecord | None = None,
        epoch: int = 0,
        former: FormerDecision | None = None,
        now_s: float = 0.0,
        parts: Sequence[type[LeaderPart]] = (),
    ) -> None:
        self._out: list[CoordinatorEffect] = []
        self._clock = OwnClock(now_s)
        self._defined = defined
        self._rules = defined.rules
        self._epoch = epoch
        self._former = former
        """Last decision in etcd, until it is known whether it is one of this run."""
        self._end_revision = 0
        """Revision of etcd's store at which an earlier leader has ended the job; 0: none has."""
        self._lock_answers = True
        self._decider = Decider(name, record, may_adopt=record is None and not epoch, emit=self._out.append)
        self._nodes: dict[str, Node] = {}
        self._links: dict[int, Node] = {}
        self._absent: dict[str, Node] = {}
        """Launchers whose connection has just ended; they may come back."""
        self._arrivals = 0
        self._sweep_s = 0.0
        self._alarms: list[float] = []
        self.is_over = False
        """The end of the job is decided."""
        self._cycle: JobCycle | None = None
        self._parts = [part() for part in parts]
        self._by_message: dict[type, LeaderPart] = {kind: part for part in self._parts for kind in _kinds(part.HEARS)}
        self._settles_nothing: tuple[type, ...] = (m.Beat, *(kind for part in self._parts for kind in part.QUIET))
        self._next_cycle = NextCycle(self._decider, self._nodes, self._parts)
        self._announcements = Announcements(self._nodes)
        self._founds_s: float | None = FOUNDING_S if record is None else None
        """When a leader without a record may decide at the latest; None: it may."""
        self._ended_s = self._over_s = self._lingers_s = 0.0
        """When the end of the job was decided, and when this leader ends at the latest, and at the earliest."""
        self._unacknowledged: set[str] = set()
        """Launchers (instances) that are to hear of the job's end, and haven't left yet."""
        self._end: m.End | None = None
        """End of the cycle: the same for all launchers that are sent it before the next ``settle``."""
        self._is_orphan = False
        self.needs_settling = False
        """An event was handled that ``settle`` may have to act on."""
        if record is not None:
            self._take_over(record)

    @property
    def alarm_s(self) -> float:
        """When ``settle`` is to be called at the latest, by the caller's clock."""
        return self._clock.callers_s(min([self._sweep_s, *self._alarms]))

    @property
    def rules(self) -> m.Rules:
        return self._rules

    @property
    def job(self) -> str:
        """Name of the job, cut to what fits into a handshake."""
        return self._defined.job[:_SHOWN_NAME]

    def orphaned(self) -> None:
        """The launcher that holds the lock has ended: so does its leader."""
        self._is_orphan = self.needs_settling = True

    # -- messages of the launchers ----------------------------------------------------------------------------

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorEffect]:
        """Take an event; returns what to do at once."""
        self._clock.set(now_s)
        self.needs_settling |= isinstance(event, Broken) or not isinstance(event.message, self._settles_nothing)
        if isinstance(event, Broken):
            node = self._links.get(event.link)
            if node is not None:
                self._gone(node, silent=event.silent, reset=event.reset)
        elif isinstance(event.message, m.Hello):
            self._hello(event.link, event.message)
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
        is_stale = node is not None and hello.session < node.session
        since_end_s = self._clock.now_s - self._ended_s
        is_late = self.is_over and is_of_next(hello, self._defined, since_end_s, self._end_revision)
        if is_stale or is_late:
            self._out.append(Drop(link))
            return
        if (refused := refusal(hello, self._defined)) is not None:
            self._out += [Send([link], refused), Drop(link)]
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
        self._out.append(Send([link], m.Admitted(self._epoch)))
        if self.is_over:
            self._unacknowledged.add(node.instance)
        if self._former is not None and knows(hello, self._former):
            self._go_on_from(self._former, believed_by_all=hello.names_life)
        elif self._decider.adopt(hello) and self._decider.record is not None:
            self._take_over(self._decider.record)
            for each in self._links.values():
                self._bring_up_to_date(each)
        else:
            self._bring_up_to_date(node)
        if (former := self._nodes.get(hello.former_instance)) is not None:
            self._left_elsewhere(former, hello.standing.report)

    def _bring_up_to_date(self, node: Node) -> None:
        """Give a launcher its place in the last cycle, take over what it reports, and send what it may have missed."""
        decision, cycle, link = self._decider.decision, self._cycle, node.link
        if decision is None or link is None:
            return
        place = self._decider.place_of(node)
        node.seat(place)
        if cycle is not None and place is not None and not cycle.occupied(place, node.instance, node.name):
            place = None
        knows = node.decided is not None and node.decided.decision.id == decision.id
        if not knows:
            if place is not None and decision.kind is DecisionKind.START:
                node.begin(decision.cycle)
            self._decider.tell(node, place)
        if self.is_over or cycle is None:
            return
        if node.standing.shutdown:
            cycle.asked_to_end(node.place, node.standing.shutdown)
        if place is None:
            self._end_without(node, cycle)
            return
        self._next_cycle.restore_place(node)
        cycle.restored(place, node.standing, self._clock.now_s)
        for part in self._parts:
            self._answer(part.joined(node, place))
        if cycle.outcome is not None:
            self._end_for([node], cycle)
        if cycle.verdict is not None and node.standing.verdict != cycle.verdict:
            self._out.append(Send([link], cycle.verdict))

    def _end_without(self, node: Node, cycle: JobCycle) -> None:
        """Tell a launcher that the others go on without its node, if it runs ranks or waits for a verdict."""
        waits = node.standing.ended is not None and node.standing.verdict is None
        if node.link is not None and (node.phase is m.NodePhase.RUNNING or (waits and node.phase is m.NodePhase.BUSY)):
            node.enter(m.NodePhase.BUSY)
            text = cycle.why_lost(node)
            self._out.append(Send([node.link], m.End(node.standing.cycle, Outcome.MEMBERSHIP, True, True, text)))

    def _heard(self, node: Node, link: int, message: m.FromMember) -> None:
        match message:
            case m.Beat(number) if number:
                self._decider.answered(node, number)
                self.needs_settling = True
            case m.Beat(progress_s=age_s):
                self._out.append(Send([link], m.Beat()))
                if age_s is not None and self._cycle is not None:
                    self._cycle.progressed(node, self._clock.now_s - age_s)
            case m.Ready(kept, store):
                node.ready(kept, store)
            case m.StockTaken(kept):
                node.stock_taken(kept)
            case m.NodeUnfit():
                node.enter(m.NodePhase.ASIDE)
                self._decider.went(node)
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
        elif (part := self._by_message.get(type(message))) is not None:
            self._answer(part.hear(node, place, message, self._clock.now_s))

    def _answer(self, answers: Iterable[ToNodes | Line]) -> None:
        """Send what a part answers."""
        for each in answers:
            assert self._cycle is not None
            if isinstance(each, Line):
                self._out += self._announcements.say(self._cycle, each.text)
                continue
            links = self._cycle.links(self._nodes.values())
            places = sorted(links)[:1] if each.to_printer else links if each.places is None else each.places
            if to := [link for place, link in links.items() if place in places]:
                self._out.append(Send(to, each.message))

    def _goodbye(self, node: Node, link: int, goodbye: m.Goodbye) -> None:
        if self.is_over:
            return  # it has been sent the end
        cycle = self._cycle
        place = None if cycle is None else cycle.place_of(node)
        self._decider.went(node)
        if node.owns and not goodbye.excluded:
            self._holder_leaves(node, place, goodbye)
            return
        if cycle is not None and place is not None:
            cycle.farewell(place, goodbye, self._clock.now_s)
        self._gone(node, silent=False)
        del self._nodes[node.instance], self._absent[node.instance]
        left = nodes_left(cycle, self._nodes, self._arrivals) if goodbye.excluded else 0
        few = "" if cycle is None or not goodbye.excluded else cycle.too_few(left)
        self._out.append(Send([link], m.Stay() if left and not few else m.Dismiss(1 if few else goodbye.code, few)))
        if few and cycle is not None:
            cycle.give_up_round(place, f"{goodbye.text}; {few}")

    def _holder_leaves(self, node: Node, place: int | None, goodbye: m.Goodbye) -> None:
        """The launcher that holds the lock is asked to stop: the job ends. It stays until all others know that."""
        node.enter(m.NodePhase.EXCLUDED)
        cycle = self._cycle
        if cycle is None:
            self._decide(self._next_cycle.end_job(None, 1, goodbye.text))
        elif place is not None:
            cycle.farewell(place, goodbye, self._clock.now_s, ends_job=True)
        else:
            cycle.asked_to_end(None, goodbye.text)

    def _left_elsewhere(self, node: Node, report: m.Report | None) -> None:
        """Take a node for excluded whose goodbye went to an earlier leader."""
        cycle = self._cycle
        if cycle is None or (place := cycle.place_of(node)) is None:
            return
        if node.link is not None:
            self._out.append(Drop(node.link))
            self._gone(node, silent=False)
        text = "" if report is None else report.cause.text
        cycle.farewell(place, m.Goodbye(text, excluded=True), self._clock.now_s)
        del self._nodes[node.instance], self._absent[node.instance]

    def _gone(self, node: Node, *, silent: bool, reset: bool = False) -> None:
        assert node.link is not None
        del self._links[node.link]
        node.disconnected(self._clock.now_s, silent=silent, reset=reset)
        self._absent[node.instance] = node
        self._decider.went(node)
        if not silent and not reset:
            self._unacknowledged.discard(node.instance)  # it has left, if the job is over

    # -- decisions ----------------------------------------------------------------------------------------------

    def _take_over(self, record: DecisionRecord) -> None:
        """Lead a job whose last decision another leader has made: its launchers have a while to come here."""
        now_s, decision = self._clock.now_s, record.decision
        self._next_cycle.took_over(record, now_s)
        self._clock.mark_unanswered()
        if decision.kind is DecisionKind.END:
            self._job_ended(record.instances, NEW_LEADER_S)
            return
        self._begin_cycle(record).await_all(record, now_s)
        self._begin_parts()

    def _go_on_from(self, former: FormerDecision, *, believed_by_all: bool) -> None:
        """Lead the job on whose last decision is in etcd. If that is its end, new launchers may be of the next run."""
        self._former = None
        self._decider.take(former.record)
        self._take_over(former.record)
        self._end_revision = 0 if believed_by_all or not self.is_over else former.revision
        for link, node in list(self._links.items()):
            if self._end_revision and node.since > former.revision:
                self._out.append(Drop(link))
                self._gone(node, silent=False)
            else:
                self._bring_up_to_date(node)

    def _may_begin_life(self, former: FormerDecision) -> bool:
        """Begin another run of the job, if enough new launchers are here, and no former one has come for a while."""
        now_s, timeout_s = self._clock.now_s, self._rules.join_timeout_s
        missing = self._rules.min_nodes - sum(node.decided is None for node in self._links.values())
        if now_s >= FORMER_S and missing <= 0:
            self._former = None
            self._out.append(BeginLife())
            return True
        if now_s < timeout_s:
            self._alarms.append(timeout_s if now_s >= FORMER_S else FORMER_S)
        elif former.record.decision.kind is DecisionKind.END:
            self._go_on_from(former, believed_by_all=True)
        else:
            self._former = None
            self._decider.take(former.record)
            text = job_lines.did_not_come(missing, seconds=timeout_s, aside=0)
            self._decide(self._next_cycle.end_job(None, self._rules.try_again_code, text))
        return False

    def lock_answers(self, answers: bool) -> None:
        """While etcd doesn't answer, another leader may lead: no launcher's silence counts."""
        self._lock_answers = answers

    def _begin_cycle(self, record: DecisionRecord) -> JobCycle:
        decision = record.decision
        self._end = None
        self._cycle = JobCycle(self._rules, decision)
        return self._cycle

    def _job_ended(self, instances: tuple[str, ...], stays_s: float) -> None:
        """Stay until the launchers of the last cycle, and those that are here, know that the job has ended."""
        self.is_over, self._ended_s, self._over_s = True, self._clock.now_s, self._clock.now_s + stays_s
        here = {node.instance for node in self._links.values()}
        gone = set() if self._cycle is None else {self._cycle.seats[place].instance for place in self._cycle.gone}
        if self._cycle is not None and self._cycle.count(NodeState.LOST, NodeState.EXCLUDED):
            self._lingers_s = self._clock.now_s + _LINGER_S
        self._unacknowledged = here | (set(instances) - gone)

    def _decide(self, plan: Plan | None) -> None:
        """Plan the next decision, if there is one, and make it, once its members have shown that they are alive."""
        if plan is not None:
            self._decider.begin(plan)
        made = self._decider.settle(self._nodes.values())
        record = self._decider.record
        if made is None or record is None:
            return
        if made.decision.kind is DecisionKind.END:
            self._job_ended(record.instances, HOLDER_STAYS_S)
            return
        cycle = self._begin_cycle(record)
        for place, node in made.members.items():
            cycle.occupied(place, node.instance, node.name)
            node.begin(made.decision.cycle)
        self._next_cycle.cycle_began()
        self._begin_parts()

    def _begin_parts(self) -> None:
        assert self._cycle is not None
        for part in self._parts:
            self._answer(part.begin(self._cycle))

    # -- what follows -----------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[CoordinatorEffect]:
        """Do what follows from all events so far."""
        self.needs_settling, self._end, self._alarms = False, None, []
        self._clock.set(now_s)
        self._look_for_lost()
        if self._may_act():
            self._decide(None)
            self._conclude()
            plan = self._next_cycle.due(self._rules, self._cycle, arrivals=self._arrivals, now_s=self._clock.now_s)
            self._announce(plan or self._decider.plan)
            self._decide(plan)
            if self._next_cycle.alarm_s is not None and self._decider.plan is None:
                self._alarms.append(self._next_cycle.alarm_s)
            if self._cycle is not None:  # after all decisions, which they mustn't delay
                self._tick_parts()
        elif self._decider.decision is None and not self.is_over:
            if not self._next_cycle.meet(self._rules, arrivals=self._arrivals, now_s=self._clock.now_s):
                self._announce(None)
        until_s = self._over_s if self._unacknowledged else self._lingers_s
        if self.is_over:
            self._alarms.append(until_s)
        is_needless = self.is_over and self._clock.now_s >= until_s
        if self._is_orphan or is_needless:
            self._out.append(Quit())
        return self._take()

    def _announce(self, coming: Plan | None) -> None:
        self._out += self._announcements.due(self._rules, self._cycle, coming, now_s=self._clock.now_s)
        self._alarms += [] if self._announcements.alarm_s is None else [self._announcements.alarm_s]

    def _may_act(self) -> bool:
        """Whether this leader knows the last decision of the job, or that there is none."""
        if self.is_over or (self._former is not None and not self._may_begin_life(self._former)):
            return False
        if self._founds_s is not None:
            fresh = [node for node in self._links.values() if node.decided is None]
            fresh = [node for node in fresh if node.phase is not m.NodePhase.EXCLUDED]
            is_new = self._decider.decision is None and len(fresh) >= self._rules.max_nodes
            if not is_new and self._clock.now_s < self._founds_s:
                self._alarms.append(self._founds_s)
                return False
            self._founds_s = None
        return True

    def _look_for_lost(self) -> None:
        if not self._lock_answers:
            self._sweep_s = self._clock.now_s + beat_s(len(self._nodes))
            return
        limit_s = lost_s(len(self._nodes))
        if self._clock.now_s >= self._sweep_s:
            self._sweep_s = self._clock.now_s + beat_s(len(self._nodes))
            for link, node in list(self._links.items()):
                if self._clock.now_s - node.heard_s >= limit_s:
                    self._out.append(Drop(link))
                    self._gone(node, silent=True)
        cycle = self._cycle
        excused_s = limit_s
        if self._absent and cycle is not None:
            excused_s = cycle.excused_s(self._links.values(), self._clock.now_s)
        for node in list(self._absent.values()):
            place = None if cycle is None else cycle.place_of(node)
            within_s = limit_s if place is None else excused_s
            until_s = node.awaited_until_s(limit_s=within_s, slept_s=self._clock.slept_s)
            if self._clock.now_s < until_s:
                self._alarms.append(until_s)
                continue
            del self._absent[node.instance], self._nodes[node.instance]
            if cycle is not None and place is not None:
                has_exited = node.has_exited(self._clock.slept_s)
                if within_s == FINISHED_S and not has_exited:
                    cycle.finish_without(place, self._why_gone(node), self._clock.now_s)
                elif has_exited or cycle.outcome is not Outcome.SUCCEEDED:  # else it is yet to hear of the end
                    cycle.lose(place, self._why_gone(node))

    def _why_gone(self, node: Node) -> str:
        if node.has_exited(self._clock.slept_s):
            return job_lines.LAUNCHER_ENDED
        now_s = self._clock.now_s
        return job_lines.reset(now_s - node.gone_s) if node.was_reset else job_lines.silent(now_s - node.heard_s)

    def _conclude(self) -> None:
        """Find out whether the cycle is over, and why, and send it."""
        cycle, rules = self._cycle, self._rules
        if cycle is None or self.is_over:
            return
        cycle.lose_missing(self._links.values(), self._clock.now_s, may_lose=self._lock_answers)
        nodes = self._nodes.values() if rules.at_once else ()
        ready = sum(node.phase is m.NodePhase.READY and node.link is not None for node in nodes)
        room = rules.max_nodes - cycle.decision.world + cycle.lost
        is_news, now_s = cycle.take_news(), self._clock.now_s
        told = [part.verdict(now_s) for part in self._parts] if cycle.outcome is None else []
        found = next((each for each in told if each is not None), None)
        if cycle.conclude(now_s, joining=max(0, min(ready, room)), found=found) or is_news:
            if cycle.outcome is not None:
                self._end_for(list(self._nodes.values()), cycle)
            if cycle.verdict is not None:
                self._out.append(Send(list(self._links), cycle.verdict))
        if cycle.outcome is not None and cycle.verdict is None:
            left = nodes_left(cycle, self._nodes, self._arrivals)
            has_absent = any(cycle.place_of(node) is not None for node in self._absent.values())
            first = printer(cycle, self._nodes.values())
            prints = "" if first is None else first.instance
            verdict = cycle.judge(self._clock.now_s, nodes_left=left, has_absent=has_absent, printer=prints)
            if verdict is not None:
                self._out += [Judged(verdict), Send(list(self._links), verdict)]
                self._next_cycle.bad_nodes.record_verdict(cycle)
        if cycle.alarm_s is not None:
            self._alarms.append(cycle.alarm_s)

    def _tick_parts(self) -> None:
        for part in self._parts:
            self._answer(part.tick(self._clock.now_s))
            self._alarms += [] if part.due_s is None else [part.due_s]

    def _end_for(self, nodes: list[Node], cycle: JobCycle) -> None:
        running = [node for node in nodes if node.phase is m.NodePhase.RUNNING and node.link is not None]
        for node in running:
            node.enter(m.NodePhase.BUSY)
        links = [node.link for node in running if node.link is not None]
        if links:
            self._end = self._end or cycle.end(nodes_left=nodes_left(cycle, self._nodes, self._arrivals))
            self._out.append(Send(links, self._end))


def _kinds(union: Any) -> tuple[type[PartMessage], ...]:
    return typing.get_args(union) or (union,)
