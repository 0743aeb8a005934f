"""The leader of a job, without I/O: it takes the launchers' messages, and returns what to send to which.

``heard`` takes a message, ``broken`` the end of a connection. ``settle`` decides what follows: call it after each batch
of those, if ``needs_settling``, and when ``alarm_s`` is over. Times are seconds of any clock that doesn't go back.

There is one leader at a time, because there is one lock: the port of the job's endpoint, or a key in etcd. A leader
keeps nothing on disk. Its launcher hands the record of the last decision to the next one, and the launchers tell all
else in their hellos. A leader without a record founds the job, or takes over the newest decision that any launcher
knows. In etcd the next leader finds the decision; it may be one of an earlier run, whose launchers are all gone.

State: the last decision, the one that is planned, if any, the nodes, and the cycle, which `JobCycle` judges.
`NextCycle` says what follows it. A node whose connection ends is *absent* until it is back, or counts as lost; a new
leader expects the nodes of the cycle in the same way. A decision is planned, its members are asked for a sign of life,
and it is made once all have answered; if one of them goes, it is planned anew.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.actions import BeginLife, CoordinatorEffect, Drop, Quit, Send
from megatron_ft.job.rules.admission import is_of_next, knows, refusal
from megatron_ft.job.rules.announcements import Announcements, printer
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.job_cycle import GONE, JobCycle
from megatron_ft.job.rules.leader_part import LeaderPart, Line, ToNodes
from megatron_ft.job.rules.liveness import FINISHED_S, OwnClock, beat_s, lost_s
from megatron_ft.job.rules.member import HOLDER_STAYS_S
from megatron_ft.job.rules.next_cycle import JobEnd, NextCycle, Plan, nodes_left
from megatron_ft.job.rules.nodes import GRACE_S, NEW_LEADER_S, Node
from megatron_ft.job.rules.restart_policy import NodeState, Outcome, furthest

FOUNDING_S = 8.0
"""Seconds for which a leader without a record decides nothing unless MAX launchers that know of no decision have come:
others may know one."""
FORMER_S = 15.0
"""Seconds for which a leader waits for a launcher that knows of the last decision in etcd."""
_LINGER_S = 5.0
"""Seconds for which the leader stays after the job's end for launchers of excluded nodes, or in place of lost ones."""


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
        former: DecisionRecord | None = None,
        now_s: float = 0.0,
        parts: Sequence[type[LeaderPart]] = (),
    ) -> None:
        self._name, self._defined, self._epoch = name, defined, epoch
        self.rules = defined.rules
        self._out: list[CoordinatorEffect] = []
        self._clock = OwnClock(now_s)
        self._former = former
        """Last decision in etcd, until it is known whether it is one of this run."""
        self._end_revision = 0
        """Revision of etcd's store at which an earlier leader has ended the job; 0: none has."""
        self.lock_answers = True
        """While etcd doesn't answer, another leader may lead: no node is lost. This leader ends where one would be."""
        self._record: DecisionRecord | None = None
        self._may_adopt = record is None and not epoch
        """True if it has decided nothing yet, and takes over what launchers know."""
        self._plan: Plan | None = None
        self._waiting: set[Node] = set()
        """Members of the planned decision that haven't answered since they were asked whether they are alive."""
        self._plans = 0
        self._nodes: dict[str, Node] = {}
        """Launchers that are connected, or may yet come (back), by instance."""
        self._links: dict[int, Node] = {}
        self._known: dict[str, Node] = {}
        """All launchers that were ever here or expected."""
        self._arrivals = 0
        self._sweep_s = 0.0
        self._alarms: list[float] = []
        self._cycle: JobCycle | None = None
        self._end: m.End | None = None
        """End of the cycle: the same for all launchers that are sent it before the next ``settle``."""
        self._parts = [part() for part in parts]
        self._by_message: dict[type, LeaderPart] = {
            kind: part for part in self._parts for kind in typing.get_args(part.HEARS) or (part.HEARS,)
        }
        self._settles_nothing: tuple[type, ...] = (m.Beat, *(kind for part in self._parts for kind in part.QUIET))
        self._next_cycle = NextCycle(self.rules, self._nodes, self._known, self._parts)
        self._announcements = Announcements(self.rules, self._nodes)
        self._founds_s: float | None = FOUNDING_S if record is None else None
        """When a leader without a record may decide at the latest; None: it may."""
        self.is_over = False
        """The end of the job is decided."""
        self._ended_s = self._over_s = self._lingers_s = 0.0
        """When the end of the job was decided, and when this leader ends at the latest, and at the earliest."""
        self._unacknowledged: set[str] = set()
        """Launchers (instances) that are to hear of the job's end, and haven't left yet."""
        self._is_deposed = False
        self.needs_settling = False
        """An event was handled that ``settle`` may have to act on."""
        if record is not None:
            self._take_over(record)

    @property
    def alarm_s(self) -> float:
        """When ``settle`` is to be called at the latest, by the caller's clock."""
        return self._clock.callers_s(min([self._sweep_s, *self._alarms]))

    # -- messages of the launchers ----------------------------------------------------------------------------

    def heard(self, link: int, message: m.FromMember, now_s: float) -> list[CoordinatorEffect]:
        """Take a message; return what to do at once. ``link`` numbers connections, and is never used again."""
        self._clock.set(now_s)
        node = self._links.get(link)
        if isinstance(message, m.Hello):
            self.needs_settling = True
            self._hello(link, message)
        elif node is not None:
            self.needs_settling |= not isinstance(message, self._settles_nothing)
            node.heard_s = self._clock.now_s
            self._heard(node, link, message)
        return self._take()

    def broken(self, link: int, now_s: float, *, silent: bool = False, reset: bool = False) -> list[CoordinatorEffect]:
        """A connection has ended. ``silent``: only nothing came any more; ``reset``: the launcher hasn't closed it."""
        self._clock.set(now_s)
        self.needs_settling = True
        if (node := self._links.get(link)) is not None:
            # after a pause of this leader a launcher may have given up waiting for an answer
            is_end = not (silent or reset or self._clock.now_s <= self._clock.slept_s + GRACE_S)
            node.heard_s = node.heard_s if silent or is_end else self._clock.now_s
            self._gone(node, silent=not is_end)
            if not (silent or reset):
                self._unacknowledged.discard(node.instance)  # closed: it has left, if the job is over
        return self._take()

    def _take(self) -> list[CoordinatorEffect]:
        taken, self._out = self._out, []
        return taken

    def _hello(self, link: int, hello: m.Hello) -> None:
        node = self._nodes.get(hello.instance)
        since_end_s = self._clock.now_s - self._ended_s
        if self.is_over and is_of_next(hello, self._defined, since_end_s, self._end_revision):
            self._out.append(Drop(link))
            return
        if (refused := refusal(hello, self._defined)) is not None:
            self._out += [Send([link], refused), Drop(link)]
            return
        if node is not None and node.link is not None:
            self._drop(node, node.link)
        adopted, last = hello.decided, self._record
        is_newer = adopted is not None and (last is None or last.decision.number < adopted.decision.number)
        if is_newer and adopted is not None and self._may_adopt:
            self._take_over(DecisionRecord(adopted.decision, adopted.store))
            for each in self._links.values():
                self._bring_up_to_date(each)
        node = self._welcome(link, hello)
        if self._former is not None and knows(hello, self._former):
            self._go_on_from(self._former, believed_by_all=hello.names_life)
        else:
            self._bring_up_to_date(node)

    def _welcome(self, link: int, hello: m.Hello) -> Node:
        """Let a launcher in: one that has just been away, one that is expected, or a new one."""
        instance, held, cycle = hello.instance, hello.decided, self._cycle
        node = self._known.get(instance) or Node(instance, hello.name)
        if cycle is not None and held is not None and held.place is not None:
            seat = cycle.seats[held.place] if held.decision.id == cycle.decision.id else None
            if seat is not None and not seat.node.has_come and seat.state is not NodeState.LOST:
                node = seat.node  # all that was known of it is its place
                for nodes in (self._nodes, self._known):
                    nodes.pop(node.instance, None)
        is_back = instance in self._nodes and node.has_come
        self._arrivals += not is_back
        node.connected(link, hello, node.arrived if is_back else self._arrivals, self._clock.now_s)
        self._nodes[instance] = self._links[link] = node
        self._known[instance] = node
        self._out.append(Send([link], m.Admitted(self._epoch)))
        if self.is_over:
            self._unacknowledged.add(instance)
        return node

    def _bring_up_to_date(self, node: Node) -> None:
        """Give a launcher its place in the last cycle, take over what it reports, and send what it may have missed."""
        decision, cycle, link = self._decision, self._cycle, node.link
        if decision is None or link is None:
            return
        seated = None if cycle is None else cycle.place_of(node)
        if node.is_excluded and cycle is not None and seated is not None:
            if seated not in cycle.gone:  # its goodbye went to an earlier leader
                text = "" if node.standing.report is None else node.standing.report.cause.text
                cycle.farewell(seated, m.Goodbye(text, excluded=True), self._clock.now_s)
            seated = None
        node.place = seated
        place = seated if cycle is not None and cycle.is_seated(node) else None
        if node.decided is None or node.decided.decision.id != decision.id:
            if place is not None and decision.kind is DecisionKind.START:
                node.begin(decision.cycle)
            self._tell(node, place)
        if self.is_over or cycle is None:
            return
        if node.standing.shutdown:
            cycle.asked_to_end(node.place, node.standing.shutdown)
        if place is None:
            self._end_without(node, link, cycle)
            return
        cycle.restored(place, node.standing, self._clock.now_s)
        for part in self._parts:
            self._answer(part.joined(node, place))
        if cycle.outcome is not None:
            self._end_for([node], cycle)
        if cycle.verdict is not None and node.standing.verdict != cycle.verdict:
            self._out.append(Send([link], cycle.verdict))

    def _end_without(self, node: Node, link: int, cycle: JobCycle) -> None:
        """Tell a launcher that the others go on without its node, if it runs ranks or waits for a verdict."""
        waits = node.standing.ended is not None and node.standing.verdict is None
        if node.phase is m.NodePhase.RUNNING or (waits and node.phase is m.NodePhase.BUSY):
            node.phase = m.NodePhase.BUSY
            place = cycle.place_of(node)
            text = f"cycle {cycle.decision.cycle} runs without it"
            text = text if place is None else cycle.seats[place].report.cause.text
            self._out.append(Send([link], m.End(node.standing.cycle, Outcome.MEMBERSHIP, True, True, text)))

    def _heard(self, node: Node, link: int, message: m.FromMember) -> None:
        cycle = self._cycle
        match message:
            case m.Beat(number) if number:
                if number == self._plans:
                    self._waiting.discard(node)
                self.needs_settling = True
            case m.Beat(progress_s=age_s):
                self._out.append(Send([link], m.ANSWER))
                if age_s is not None and cycle is not None:
                    cycle.progressed(node, self._clock.now_s - age_s)
            case m.Ready():
                node.ready(message)
            case m.NodeUnfit():
                node.phase = m.NodePhase.ASIDE
                self._not_ready(node)
            case m.Goodbye():
                self._goodbye(node, link, message)
            case m.Shutdown(text) if cycle is not None:
                cycle.asked_to_end(node.place, text)
            case _ if cycle is not None and (place := cycle.place_of(node)) is not None:
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
            links = self._cycle.links()
            places = links if each.places is None else each.places
            if to := [link for place, link in links.items() if place in places]:
                self._out.append(Send(to, each.message))

    # -- launchers that go ------------------------------------------------------------------------------------

    def _goodbye(self, node: Node, link: int, goodbye: m.Goodbye) -> None:
        if self.is_over:
            return  # it has been sent the end
        cycle = self._cycle
        place = None if cycle is None else cycle.place_of(node)
        self._not_ready(node)
        ends_job = node.hello.owns and not goodbye.excluded
        if cycle is not None and place is not None:
            cycle.farewell(place, goodbye, self._clock.now_s, ends_job=ends_job)
        if ends_job:  # it holds the lock, and stays until all others know of the end
            node.phase = m.NodePhase.EXCLUDED
            if cycle is None:
                self._end_job(1, goodbye.text)
            elif place is None:
                cycle.asked_to_end(None, goodbye.text)
            return
        self._forget(node)
        left = nodes_left(cycle, self._nodes, self._arrivals) if goodbye.excluded else 0
        few = ""
        if cycle is not None and goodbye.excluded and left < self.rules.min_nodes:
            few = job_lines.too_few_left(left=left, min_nodes=self.rules.min_nodes)
        self._out.append(Send([link], m.Stay() if left and not few else m.Dismiss(1 if few else goodbye.code, few)))
        if few and cycle is not None and cycle.restarts:  # the others, which meet for the next cycle, are too few
            cycle.asked_to_end(place, f"{goodbye.text}; {few}")

    def _drop(self, node: Node, link: int, *, silent: bool = False) -> None:
        self._out.append(Drop(link))
        self._gone(node, silent=silent)

    def _gone(self, node: Node, *, silent: bool) -> None:
        """A launcher's connection has ended: it may be back."""
        assert node.link is not None
        del self._links[node.link]
        node.link, node.silent, node.gone_s = None, silent, self._clock.now_s
        self._not_ready(node)
        if not silent:
            self._unacknowledged.discard(node.instance)  # it has left, if the job is over

    def _forget(self, node: Node) -> None:
        """A launcher has left, or counts as lost."""
        if node.link is not None:
            self._gone(node, silent=False)
        del self._nodes[node.instance]

    def _not_ready(self, node: Node) -> None:
        """Plan the next decision again if it has a place for this node."""
        if self._plan is not None and node in self._plan.members:
            self._plan = None

    def _look_for_lost(self) -> None:
        now_s, limit_s = self._clock.now_s, lost_s(len(self._nodes))
        if now_s >= self._sweep_s:
            self._sweep_s = now_s + beat_s(len(self._nodes))
            for link, node in list(self._links.items()):
                if now_s - node.heard_s >= limit_s:
                    self._drop(node, link, silent=True)
        cycle = self._cycle
        absent = sorted((node for node in self._nodes.values() if node.link is None), key=lambda node: node.gone_s)
        excused_s = cycle.excused_s(now_s) if absent and cycle is not None else limit_s
        for node in absent:
            place = None if cycle is None else cycle.place_of(node)
            within_s = limit_s if place is None else excused_s
            until_s = node.awaited_until_s(within_s)
            if now_s < until_s:
                self._alarms.append(until_s)
                continue
            if not self.lock_answers:
                # another launcher may lead, and it is this leader that the others are missing
                goes_on = cycle is not None and cycle.outcome is None and within_s != FINISHED_S
                self._is_deposed |= place is not None and node.silent and goes_on
                continue
            self._forget(node)
            if cycle is None or place is None:
                continue
            if not node.silent:
                cycle.lose(place, "its launcher exited")
                continue
            text = f"no message from its launcher for {now_s - node.heard_s:.1f} s"
            if within_s == FINISHED_S:
                cycle.finish_without(place, text, now_s)
            elif cycle.outcome is not Outcome.SUCCEEDED:  # else it is yet to hear of the end
                cycle.lose(place, text)

    # -- decisions ----------------------------------------------------------------------------------------------

    @property
    def _decision(self) -> Decision | None:
        return None if self._record is None else self._record.decision

    def _take_over(self, record: DecisionRecord) -> None:
        """Lead a job whose last decision another leader has made: its launchers have a while to come here."""
        now_s, decision = self._clock.now_s, record.decision
        self._record, self._plan = record, None
        self._clock.mark_unanswered()
        for instance in [node.instance for node in self._known.values() if not node.has_come]:
            for known in (self._nodes, self._known):
                known.pop(instance, None)
        if decision.kind is DecisionKind.END:
            self._job_ended(record.instances, NEW_LEADER_S)
            return
        names = record.names or ("",) * decision.world  # one that a launcher knows doesn't tell of the others
        instances = record.instances or [f"{decision.id} {place}" for place in range(decision.world)]
        nodes = []
        for place, (instance, name) in enumerate(zip(instances, names, strict=True)):
            node = self._nodes.get(instance)
            if node is None:
                node = Node(instance, name, heard_s=now_s, gone_s=now_s, silent=True)
                self._nodes[instance] = self._known[instance] = node
            node.place = place
            nodes.append(node)
        self._next_cycle.took_over(nodes, now_s)
        self._begin_cycle(decision, nodes)

    def _go_on_from(self, former: DecisionRecord, *, believed_by_all: bool) -> None:
        """Lead the job on whose last decision is in etcd. If that is its end, new launchers may be of the next run."""
        self._former = None
        self._take_over(former)
        self._end_revision = 0 if believed_by_all or not self.is_over else former.revision
        for link, node in list(self._links.items()):
            if self._end_revision and node.hello.since >= former.revision:
                self._drop(node, link)
            else:
                self._bring_up_to_date(node)

    def _may_begin_life(self, former: DecisionRecord) -> bool:
        """Begin another run of the job, if enough new launchers are here, and no former one has come for a while."""
        now_s, timeout_s = self._clock.now_s, self.rules.join_timeout_s
        missing = self.rules.min_nodes - sum(node.decided is None for node in self._links.values())
        if now_s >= FORMER_S and missing <= 0:
            self._former = None
            self._out.append(BeginLife())
            return True
        if now_s < timeout_s:
            self._alarms.append(timeout_s if now_s >= FORMER_S else FORMER_S)
        elif former.decision.kind is DecisionKind.END:
            self._go_on_from(former, believed_by_all=True)
        else:
            self._former, self._record = None, former
            text = job_lines.did_not_come(missing, seconds=timeout_s, aside=0)
            self._end_job(TRY_AGAIN_CODE, text)
        return False

    def _begin_plan(self, plan: Plan) -> None:
        """Number the next decision, and ask its members for a sign of life: once all have answered it is made."""
        self._plans += 1
        name, last = f"{self._name}.{self._plans}", self._decision
        number, founding = (0, name) if last is None else (last.number + 1, last.founding)
        decision = replace(plan.decision, number=number, id=name, founding=founding)
        self._plan, self._waiting = Plan(decision, plan.members), set(plan.members)
        if links := [node.link for node in plan.members if node.link is not None]:
            self._out.append(Send(links, m.Beat(self._plans)))
        self._decide()

    def _end_job(self, code: int, text: str) -> None:
        last, cycle, first = self._decision, self._cycle, printer(self._cycle, self._nodes.values())
        decision = Decision(
            -1,
            "",
            DecisionKind.END,
            cycle=-1 if last is None else last.cycle,
            world=0 if last is None else last.world,
            restarts=0 if last is None else last.restarts,
            advance=furthest(node.hello.before for node in self._nodes.values()) if cycle is None else cycle.advance,
            code=code,
            text=text,
            printer="" if first is None else first.instance,
        )
        self._begin_plan(Plan(decision, ()))

    def _decide(self) -> None:
        """Make the planned decision, if its members have answered: first for the lock's holder, then for all."""
        if self._plan is None or self._waiting:
            return
        (decision, members), self._plan, self._may_adopt = self._plan, None, False
        if decision.kind is DecisionKind.START:
            instances, names = tuple(node.instance for node in members), tuple(node.name for node in members)
            self._record = DecisionRecord(decision, members[0].standing.store, instances, names)
        else:  # the launchers of the last cycle are to hear of it
            self._record = replace(self._record or DecisionRecord(decision), decision=decision, revision=0)
        self._out.append(self._record)
        for place, node in enumerate(members):
            self._tell(node, place)
        outside, takes_part = Assignment(decision), set(members)
        others = {link: node for link, node in self._links.items() if node not in takes_part}
        for node in others.values():
            node.learn(outside)
        if others:
            self._out.append(Send(list(others), outside))
        if decision.kind is DecisionKind.END:
            self._job_ended(self._record.instances, HOLDER_STAYS_S)
            return
        for node in members:
            node.begin(decision.cycle)
        self._next_cycle.cycle_began()
        self._begin_cycle(decision, members)

    def _tell(self, node: Node, place: int | None) -> None:
        """Send the last decision to a launcher, which has this place by it."""
        assert self._record is not None
        held = Assignment(self._record.decision, place, "" if place is None else self._record.store)
        node.learn(held)
        if node.link is not None:
            self._out.append(Send([node.link], held))

    def _begin_cycle(self, decision: Decision, nodes: Iterable[Node]) -> None:
        self._end, self._cycle = None, JobCycle(self.rules, decision, nodes)
        for part in self._parts:
            self._answer(part.begin(self._cycle))

    def _job_ended(self, instances: tuple[str, ...], stays_s: float) -> None:
        """Stay until the launchers of the last cycle, and those that are here, know that the job has ended."""
        self.is_over, self._ended_s, self._over_s = True, self._clock.now_s, self._clock.now_s + stays_s
        cycle, here = self._cycle, {node.instance for node in self._links.values()}
        gone = set() if cycle is None else {cycle.seats[place].node.instance for place in cycle.gone}
        if cycle is not None and cycle.count(*GONE):
            self._lingers_s = self._clock.now_s + _LINGER_S
        self._unacknowledged = here | (set(instances) - gone)

    # -- what follows -----------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[CoordinatorEffect]:
        """Do what follows from all events so far."""
        self.needs_settling, self._end, self._alarms = False, None, []
        self._clock.set(now_s)
        self._look_for_lost()
        if self._may_act():
            self._decide()
            self._conclude()
            self._go_on()
            for part in self._parts if self._cycle is not None else ():  # after all decisions, which they mustn't delay
                self._answer(part.tick(self._clock.now_s))
                self._alarms += [] if part.due_s is None else [part.due_s]
        elif self._record is None and not self.is_over:
            if not self._next_cycle.meet(self._clock.now_s):
                self._announce(begins=False)
        until_s = self._over_s if self._unacknowledged else self._lingers_s
        if self.is_over:
            self._alarms.append(until_s)
        if self._is_deposed or (self.is_over and self._clock.now_s >= until_s):
            self._out.append(Quit())
        return self._take()

    def _may_act(self) -> bool:
        """Return True if this leader knows the last decision of the job, or that there is none."""
        if self.is_over or (self._former is not None and not self._may_begin_life(self._former)):
            return False
        if self._founds_s is not None:
            fresh = [node for node in self._links.values() if node.decided is None and not node.is_excluded]
            is_new = self._record is None and len(fresh) >= self.rules.max_nodes
            if not is_new and self._clock.now_s < self._founds_s:
                self._alarms.append(self._founds_s)
                return False
            self._founds_s = None
        return True

    def _conclude(self) -> None:
        """Find out whether the cycle is over, and why, and send it."""
        cycle, rules, now_s = self._cycle, self.rules, self._clock.now_s
        if cycle is None or self.is_over:
            return
        awaits = any(node.link is None and cycle.place_of(node) is not None for node in self._nodes.values())
        ready = sum(node.is_ready for node in self._nodes.values()) if rules.at_once else 0
        room = rules.max_nodes - cycle.decision.world + cycle.count(*GONE)
        told = [part.verdict(now_s) for part in self._parts] if cycle.outcome is None else []
        found = next((each for each in told if each is not None), None)
        is_news, cycle.is_news = cycle.is_news, False
        if cycle.conclude(now_s, joining=max(0, min(ready, room)), awaits=awaits, found=found) or is_news:
            if cycle.outcome is not None:
                self._end_for(self._nodes.values(), cycle)
            if cycle.verdict is not None:
                self._out.append(Send(list(self._links), cycle.verdict))
        if cycle.outcome is not None and cycle.verdict is None:
            left, first = nodes_left(cycle, self._nodes, self._arrivals), printer(cycle, self._nodes.values())
            prints = "" if first is None else first.instance
            verdict = cycle.judge(now_s, nodes_left=left, awaits=awaits, printer=prints)
            if verdict is not None:
                self._out.append(Send(list(self._links), verdict))
                self._next_cycle.bad_nodes.record_verdict(cycle)
        if cycle.alarm_s is not None:
            self._alarms.append(cycle.alarm_s)

    def _go_on(self) -> None:
        """Plan the next decision, if one is due."""
        now_s, due = self._clock.now_s, None
        if self._plan is None and not self.is_over:
            due = self._next_cycle.due(self._cycle, now_s)
        if isinstance(due, JobEnd):
            self._end_job(due.code, due.text)
            return
        self._announce(begins=(due or self._plan) is not None)
        if due is not None:
            self._begin_plan(due)
        elif self._next_cycle.alarm_s is not None and self._plan is None:
            self._alarms.append(self._next_cycle.alarm_s)

    def _announce(self, *, begins: bool) -> None:
        self._out += self._announcements.due(self._cycle, now_s=self._clock.now_s, begins=begins)
        self._alarms += [] if self._announcements.alarm_s is None else [self._announcements.alarm_s]

    def _end_for(self, nodes: Iterable[Node], cycle: JobCycle) -> None:
        running = {node.link: node for node in nodes if node.phase is m.NodePhase.RUNNING and node.link is not None}
        for node in running.values():
            node.phase = m.NodePhase.BUSY
        if running:
            self._end = self._end or cycle.end(nodes_left=nodes_left(cycle, self._nodes, self._arrivals))
            self._out.append(Send([*running], self._end))
