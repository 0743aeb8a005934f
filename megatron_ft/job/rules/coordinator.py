"""The leader of a job, without I/O: it takes the launchers' messages, and returns what to send to which.

``heard`` takes a message, ``broken`` the end of a connection. ``settle`` decides what follows: call it after each batch
of those, if ``needs_settling``, and when ``alarm_s`` is over. Times are seconds of any clock that doesn't go back.

State: the last decision, the one that is planned, if any, the nodes, and the cycle, which `JobCycle` judges.
`NextCycle` says what follows it. A node whose connection ends is *absent* until it is back, or counts as lost; a new
leader expects the nodes of the cycle in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.actions import CoordinatorEffect, Drop, Quit, Send
from megatron_ft.job.rules.admission import is_of_next, knows, refusal
from megatron_ft.job.rules.announcements import Announcements, printer
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.job_cycle import GONE, JobCycle
from megatron_ft.job.rules.leader_part import Answers, LeaderPart
from megatron_ft.job.rules.liveness import FINISHED_S, OwnClock, beat_s, lost_s
from megatron_ft.job.rules.member import HOLDER_STAYS_S
from megatron_ft.job.rules.next_cycle import JobEnd, NextCycle, Plan
from megatron_ft.job.rules.nodes import GRACE_S, NEW_LEADER_S, Node
from megatron_ft.job.rules.restart_policy import Outcome, furthest
from megatron_ft.link.base.codec import NO_PARTS

FOUNDING_S = 8.0
"""Seconds for which a leader without a record decides nothing unless MAX launchers that know of no decision have come:
others may know one."""
FORMER_S = 15.0
"""Seconds for which a leader waits for a launcher that knows of the last decision in etcd."""
_LINGER_S = 5.0
"""Seconds for which the leader stays after the job's end for launchers that it doesn't know, and those of nodes that
are lost or excluded: they may come (back)."""
_NO_RECORD = DecisionRecord(Decision(-1, "", DecisionKind.START, cycle=-1, world=0))


class Coordinator:
    """See above. No two have the same ``name``. ``defined``: the job of the launcher that has started it.

    ``record``: that of the last decision, from an earlier leader; None if there is none.
    ``epoch``: of the lock in etcd, where the record may be of an earlier run; 0: the lock is the endpoint's port.
    """

    def __init__(
        self,
        name: str,
        defined: m.JobDefinition,
        *,
        record: DecisionRecord | None = None,
        epoch: int = 0,
        now_s: float = 0.0,
        parts: Sequence[type[LeaderPart]] = (),
    ) -> None:
        self._name, self._defined, self._epoch = name, defined, epoch
        self.rules = defined.rules
        self._out: list[CoordinatorEffect] = []
        self._clock = OwnClock(now_s)
        self._former = record if epoch else None
        """Last decision in etcd, until it is known whether it is one of this run."""
        self.lock_answers = True
        """While etcd doesn't answer, another leader may lead: no node is lost. This leader ends where one would be."""
        self._record = _NO_RECORD
        self._founds_s = FOUNDING_S if record is None else None
        """When a leader without a record may decide; until it has decided, it takes over what launchers know."""
        self._plan: Plan | None = None
        self._waiting: set[int] = set()
        """Connections of its members that haven't answered since they were asked whether they are alive."""
        self._plans = 0
        self._nodes: dict[str, Node] = {}
        """All launchers that were ever here or expected, by instance."""
        self._links: dict[int, Node] = {}
        self._alarms: list[float | None] = [0.0]
        self._cycle: JobCycle | None = None
        self._end: m.End | None = None
        """End of the cycle: the same for all launchers that are sent it before the next ``settle``."""
        self._parts = [part() for part in parts]
        self._settles_nothing: tuple[type, ...] = (m.Beat, *(kind for part in self._parts for kind in part.QUIET))
        self._next_cycle = NextCycle(self.rules, self._nodes, self._parts)
        self._announcements = Announcements(self.rules, self._nodes)
        self._is_over = False
        self._ended_s, self._stays_s = 0.0, HOLDER_STAYS_S
        """When the end of the job was decided, or taken over; seconds for which this leader stays to tell it."""
        self.needs_settling = False
        """An event was handled that ``settle`` may have to act on."""
        if record is not None and not epoch:
            self._take_over(record)

    @property
    def alarm_s(self) -> float:
        """When ``settle`` is to be called at the latest, by the caller's clock."""
        return self._clock.callers_s(min(each for each in self._alarms if each is not None))

    # -- messages of the launchers ----------------------------------------------------------------------------

    def heard(self, link: int, message: m.FromMember, now_s: float) -> list[CoordinatorEffect]:
        """Take a message; return what to do at once. ``link`` numbers connections, and is never used again."""
        self._clock.set(now_s)
        self.needs_settling |= not isinstance(message, self._settles_nothing)
        if isinstance(message, m.Hello):
            self._hello(link, message)
        elif (node := self._links.get(link)) is not None:
            node.heard_s = self._clock.now_s
            self._heard(node, link, message)
        return self._take()

    def broken(self, link: int, now_s: float, *, silent: bool = False, reset: bool = False) -> list[CoordinatorEffect]:
        """A connection has ended. ``silent``: only nothing came any more; ``reset``: the launcher hasn't closed it."""
        self._clock.set(now_s)
        self.needs_settling = True
        if (node := self._links.get(link)) is not None:
            if not silent:
                node.heard_s = self._clock.now_s
            # after a pause of this leader a launcher may have given up waiting for an answer
            has_left = not (silent or reset) and (self._is_over or self._clock.now_s > self._clock.slept_s + GRACE_S)
            self._gone(node, silent=not has_left)
            node.is_gone = has_left and self._is_over
        return self._take()

    def _take(self) -> list[CoordinatorEffect]:
        taken, self._out = self._out, []
        return taken

    def _hello(self, link: int, hello: m.Hello) -> None:
        """Let a launcher in: one that has just been away, one that is expected, or a new one."""
        if self._is_of_next(hello):
            self._out.append(Drop(link))
            return
        if (refused := refusal(hello, self._defined)) is not None:
            self._out += [Send([link], refused), Drop(link)]
            return
        instance, held, may_adopt = hello.instance, hello.decided, self._founds_s is not None and not self._epoch
        if self._former is not None and knows(hello, self._former):
            self._take_over(self._former)
        elif may_adopt and held is not None and self._record.decision.number < held.decision.number:
            self._take_over(DecisionRecord(held.decision, held.store))
        node, cycle = self._nodes.get(instance) or Node(instance, hello.name), self._cycle
        if node.link is not None:
            self._gone(node, drops=True)
        if cycle is not None and held is not None and held.place is not None and held.decision.id == cycle.decision.id:
            seated = cycle.seats[held.place].node
            node = node if seated.arrived else self._nodes.pop(seated.instance, seated)  # only its place was known
        self._nodes[instance] = self._links[link] = node
        node.instance, node.name, node.link, node.is_gone = instance, hello.name, link, False
        node.decided, node.standing, node.phase = held, hello.standing, hello.standing.phase
        node.hello = replace(hello, decided=None, standing=m.NodeStatus())  # both change, and may be large
        node.heard_s, node.arrived = self._clock.now_s, node.arrived or len(self._nodes)
        self._out.append(Send([link], m.Admitted(self._epoch)))
        if self._record is not _NO_RECORD:
            self._bring_up_to_date(node, link)

    def _bring_up_to_date(self, node: Node, link: int) -> None:
        """Give a launcher its place in the last cycle, take over what it reports, and send what it may have missed."""
        decision, cycle = self._record.decision, self._cycle
        seated = None if cycle is None else cycle.place_of(node)
        if node.is_excluded and cycle is not None and seated is not None:  # its goodbye went to an earlier leader
            text = "" if node.standing.report is None else node.standing.report.cause.text
            cycle.farewell(seated, m.Goodbye(text, excluded=True, code=0), self._clock.now_s)
            seated = None
        node.place = seated
        place = seated if cycle is not None and cycle.is_seated(node) else None
        if node.decided is None or node.decided.decision.id != decision.id:
            if place is not None and not self._is_over:
                node.begin(decision.cycle)
            self._tell([node], place)
        if self._is_over or cycle is None:
            return
        if node.standing.shutdown:
            cycle.asked_to_end(seated, node.standing.shutdown)
        if place is None:
            waits = node.standing.ended is not None and node.standing.verdict is None
            if node.phase is m.NodePhase.RUNNING or (waits and node.phase is m.NodePhase.BUSY):
                node.phase = m.NodePhase.BUSY
                text = f"cycle {cycle.decision.cycle} runs without it"
                text = text if seated is None else cycle.seats[seated].report.cause.text
                self._out.append(Send([link], m.End(node.standing.cycle, Outcome.MEMBERSHIP, True, True, text)))
            return
        cycle.restored(place, node.standing, self._clock.now_s)
        for part in self._parts:
            self._answer(part.joined(node, place))
        if cycle.outcome is not None:
            self._end_for([node], cycle)
        if cycle.verdict is not None and node.standing.verdict != cycle.verdict:
            self._out.append(Send([link], cycle.verdict))

    def _heard(self, node: Node, link: int, message: m.FromMember) -> None:
        cycle, now_s = self._cycle, self._clock.now_s
        match message:
            case m.Beat(number) if number and number == self._plans:
                self._waiting.discard(link)
                self.needs_settling |= not self._waiting
            case m.Beat(progress_s=age_s):
                self._out.append(Send([link], m.ANSWER))
                if age_s is not None and cycle is not None:
                    cycle.progressed(node, now_s - age_s)
            case m.Ready(parts, store) if node.phase is not m.NodePhase.RUNNING:  # else it has crossed a decision
                parts, node.phase = node.standing.parts.updated(*parts), m.NodePhase.READY
                node.standing = replace(node.standing, parts=parts, store=store)
            case m.NodeUnfit():
                node.phase = m.NodePhase.ASIDE
            case m.Goodbye():
                self._goodbye(node, link, message)
            case m.Shutdown(text) if cycle is not None:
                cycle.asked_to_end(node.place, text)
            case _ if cycle is not None and (place := cycle.place_of(node)) is not None:
                if isinstance(message, m.Report):
                    cycle.changed(place, message)
                for part in self._parts:
                    self._answer(part.hear(node, place, message, now_s) if isinstance(message, part.HEARS) else ())

    def _answer(self, answers: Answers) -> None:
        """Send what a part answers."""
        for each in answers:
            assert self._cycle is not None
            if isinstance(each, str):
                self._out += self._announcements.say(self._cycle, each)
                continue
            links = self._cycle.links()
            places = links if each.places is None else each.places
            if to := [link for place, link in links.items() if place in places]:
                self._out.append(Send(to, each.message))

    # -- launchers that go ------------------------------------------------------------------------------------

    def _goodbye(self, node: Node, link: int, goodbye: m.Goodbye) -> None:
        if self._is_over:
            return  # it has been sent the end
        cycle = self._cycle
        place = None if cycle is None else cycle.place_of(node)
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
        self._gone(node)
        node.is_gone = True
        few, left = "", self._next_cycle.nodes_left(cycle)
        if cycle is not None and goodbye.excluded and left < self.rules.min_nodes:
            few = job_lines.too_few_left(left=left, min_nodes=self.rules.min_nodes)
        stays = goodbye.excluded and not few
        self._out.append(Send([link], m.Stay() if stays else m.Dismiss(1 if few else goodbye.code, few)))
        if few and cycle is not None and cycle.restarts:  # the others, which meet for the next cycle, are too few
            cycle.asked_to_end(place, f"{goodbye.text}; {few}")

    def _gone(self, node: Node, *, silent: bool = False, drops: bool = False) -> None:
        """A launcher's connection has ended, or ends here: it may be back."""
        assert node.link is not None
        if drops:
            self._out.append(Drop(node.link))
        del self._links[node.link]
        node.link, node.silent, node.gone_s = None, silent, self._clock.now_s

    def _look_for_lost(self) -> bool:
        """Count launchers as lost that are away for too long; return True if it may be this leader that is lost."""
        now_s, cycle, may_be_lost = self._clock.now_s, self._cycle, False
        limit_s = lost_s(max(len(self._links), self._record.decision.world))
        for node in list(self._links.values()):
            if now_s - node.heard_s >= limit_s:
                self._gone(node, silent=True, drops=True)
        absent = [node for node in self._nodes.values() if node.link is None and not node.is_gone]
        are_silent = any(node.silent for node in absent)
        excused_s = cycle.excused_s(now_s) if are_silent and cycle is not None else limit_s
        for node in sorted(absent, key=lambda node: node.gone_s):
            place = None if cycle is None else cycle.place_of(node)
            within_s = limit_s if place is None else excused_s
            # a kernel may have given the connection up before: packets to the node were lost, while those from it came
            until_s = max(node.gone_s, node.heard_s + within_s) if node.silent else node.gone_s + GRACE_S
            until_s = until_s if node.arrived else node.gone_s + max(NEW_LEADER_S, within_s)
            if now_s < until_s:
                self._alarms.append(until_s)
                continue
            if self._is_over and node.silent:
                continue  # it is yet to hear of the end
            node.is_gone = self.lock_answers
            if cycle is None or place is None:
                continue
            if not self.lock_answers:  # another launcher may lead, and it is this leader that the others are missing
                may_be_lost |= node.silent and cycle.outcome is None and within_s != FINISHED_S
                continue
            away = f"no message from its launcher for {now_s - node.heard_s:.1f} s"
            if node.silent and within_s == FINISHED_S:
                cycle.finish_without(place, away, now_s)
            elif not (node.silent and cycle.outcome is Outcome.SUCCEEDED):  # it is yet to hear of the end
                cycle.lose(place, away if node.silent else "its launcher exited")
        return may_be_lost

    # -- decisions ----------------------------------------------------------------------------------------------

    def _is_of_next(self, hello: m.Hello) -> bool:
        """Return True if the job has ended, and a launcher is to wait for the leader of the next one."""
        since_end_s = self._clock.now_s - self._ended_s
        return self._is_over and is_of_next(hello, self._defined, since_end_s, self._record.revision)

    def _take_over(self, record: DecisionRecord) -> None:
        """Lead a job whose last decision another leader has made: its launchers have a while to come here."""
        now_s, decision = self._clock.now_s, record.decision
        self._record, self._former, self._plan = record, None, None
        self._clock.slept_s = now_s  # others may have called here until now, and given up
        for instance in [node.instance for node in self._nodes.values() if not node.arrived]:
            del self._nodes[instance]
        world = 0 if decision.kind is DecisionKind.END else decision.world
        instances = record.instances or [f"{decision.id} {place}" for place in range(world)]
        names = record.names or ("",) * len(instances)  # one that a launcher knows doesn't tell of the others
        nodes = []
        for place, (instance, name) in enumerate(zip(instances, names, strict=True)):
            node = self._nodes.get(instance)
            if node is None or node.is_gone:
                node = self._nodes[instance] = Node(instance, name, heard_s=now_s, gone_s=now_s, silent=True)
            node.place = place
            nodes.append(node)
        if decision.kind is DecisionKind.END:
            self._is_over, self._ended_s, self._stays_s = True, now_s, NEW_LEADER_S
        else:
            self._next_cycle.took_over(nodes, now_s)
            self._begin_cycle(decision, nodes)
        for link, node in list(self._links.items()):
            if self._is_of_next(node.hello):
                self._gone(node, drops=True)
                node.is_gone = True
            else:
                self._bring_up_to_date(node, link)

    def _begin_plan(self, plan: Plan) -> None:
        """Number the next decision, and ask its members for a sign of life: once all have answered it is made."""
        self._plans += 1
        name, last = f"{self._name}.{self._plans}", self._record.decision
        decision = replace(plan.decision, number=last.number + 1, id=name, founding=last.founding or name)
        self._plan = Plan(decision, plan.members)
        self._waiting = {node.link for node in plan.members if node.link is not None}
        if self._waiting:
            self._out.append(Send([*self._waiting], m.Beat(self._plans)))
        self._decide()

    def _end_job(self, code: int, text: str) -> None:
        cycle, first = self._cycle, printer(self._cycle, self._nodes.values())
        prints = first.instance if first else ""
        advance = furthest(node.hello.before for node in self._nodes.values()) if cycle is None else cycle.advance
        last = replace(self._record.decision, back=(), shift=0, attachments=NO_PARTS)
        decision = replace(last, kind=DecisionKind.END, advance=advance, code=code, text=text, printer=prints)
        self._begin_plan(Plan(decision, ()))

    def _decide(self) -> None:
        """Make the planned decision, if its members have answered: first for the lock's holder, then for all."""
        if self._plan is None:
            return
        decision, members = self._plan
        if not (all(node.is_ready for node in members) and self._waiting <= self._links.keys()):
            self._plan = None  # one of them has gone: it is planned anew
        if self._plan is None or self._waiting:
            return
        self._plan = self._founds_s = None
        if decision.kind is DecisionKind.START:
            instances, names = tuple(node.instance for node in members), tuple(node.name for node in members)
            self._record = DecisionRecord(decision, members[0].standing.store, instances, names)
        else:  # the launchers of the last cycle are to hear of it
            self._record = replace(self._record, decision=decision, revision=0)
        self._out.append(self._record)
        for place, node in enumerate(members):
            self._tell([node], place)
        takes_part = set(members)
        self._tell([node for node in self._links.values() if node not in takes_part])
        if decision.kind is DecisionKind.END:
            self._is_over, self._ended_s, cycle = True, self._clock.now_s, self._cycle
            for node in self._nodes.values():
                node.is_gone |= node.link is None
            for place, seat in enumerate(() if cycle is None else cycle.seats):
                seat.node.is_gone &= cycle is not None and place in cycle.gone  # a silent one is to hear of it, too
            return
        for node in members:
            node.begin(decision.cycle)
        self._next_cycle.cycle_began()
        self._begin_cycle(decision, members)

    def _tell(self, nodes: Sequence[Node], place: int | None = None) -> None:
        """Send the last decision to launchers, which have this place by it."""
        held = Assignment(self._record.decision, place, "" if place is None else self._record.store)
        for node in nodes:
            node.decided, node.place = held, place
        if links := [node.link for node in nodes if node.link is not None]:
            self._out.append(Send(links, held))

    def _begin_cycle(self, decision: Decision, nodes: Iterable[Node]) -> None:
        self._end, self._cycle = None, JobCycle(self.rules, decision, nodes)
        for part in self._parts:
            self._answer(part.begin(self._cycle))

    # -- what follows -----------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[CoordinatorEffect]:
        """Do what follows from all events so far."""
        self._clock.set(now_s)
        self.needs_settling, self._end = False, None
        self._alarms = [self._clock.now_s + beat_s(len(self._nodes))]
        is_done, meeting = self._look_for_lost(), None
        if self._may_decide():
            self._decide()
            self._conclude()
            if self._plan is None:
                due = self._next_cycle.due(self._cycle, self._clock.now_s)
                self._alarms.append(self._next_cycle.alarm_s)
                if isinstance(due, JobEnd):
                    self._end_job(due.code, due.text)
                elif isinstance(due, Plan):
                    self._begin_plan(due)
                else:
                    meeting = due
            for part in self._parts if self._cycle is not None else ():  # after all decisions, which they mustn't delay
                self._answer(part.tick(self._clock.now_s))
                self._alarms.append(part.due_s)
        elif self._record is _NO_RECORD:
            met = self._next_cycle.meet(None, self._clock.now_s)
            meeting = met if met.enough < self.rules.min_nodes else None
        if self._is_over:
            is_owed = any(not node.is_gone for node in self._nodes.values())
            cycle, is_new = self._cycle, self._stays_s == NEW_LEADER_S  # spares aren't in the record
            may_come = is_new or (cycle is not None and bool(cycle.gone - cycle.leaving.keys()))
            stays_s = self._stays_s if is_owed else _LINGER_S if may_come else 0.0
            is_done = self._clock.now_s >= self._ended_s + stays_s
        else:
            self._out += self._announcements.due(self._cycle, meeting, self._clock.now_s)
        if is_done:
            self._out.append(Quit())
        return self._take()

    def _may_decide(self) -> bool:
        """Return True if this leader knows the last decision of the job, or that there is none.

        The last one in etcd may be of an earlier run. Another run begins if enough new launchers are here, and no
        former one has come for a while.
        """
        now_s, rules, former = self._clock.now_s, self.rules, self._former
        is_first = former is not None or self._record is _NO_RECORD
        fresh = [node for node in self._links.values() if node.decided is None] if is_first else []
        if former is not None and now_s >= FORMER_S and len(fresh) >= rules.min_nodes:
            self._former = None
        elif former is not None and now_s >= rules.join_timeout_s:
            if former.decision.kind is DecisionKind.END:
                self._take_over(replace(former, revision=0))  # which all believe
            else:
                self._former, self._record = None, former
                missing, seconds = rules.min_nodes - len(fresh), rules.join_timeout_s
                self._end_job(TRY_AGAIN_CODE, job_lines.did_not_come(missing, seconds=seconds, aside=0))
        if self._former is not None or self._is_over:
            return False
        is_new = self._record is _NO_RECORD and sum(not node.is_excluded for node in fresh) >= rules.max_nodes
        return self._founds_s is None or is_new or now_s >= self._founds_s

    def _conclude(self) -> None:
        """Find out whether the cycle is over, and why, and send it."""
        cycle, rules, now_s, nodes = self._cycle, self.rules, self._clock.now_s, self._nodes.values()
        if cycle is None:
            return
        awaits = any(node.link is None and not node.is_gone and cycle.place_of(node) is not None for node in nodes)
        ready = sum(node.is_ready for node in nodes) if rules.at_once else 0
        room = rules.max_nodes - cycle.decision.world + cycle.count(*GONE)
        told = [part.verdict(now_s) for part in self._parts] if cycle.outcome is None else []
        until_s = next((each for each in told if each is not None), None)
        cycle.conclude(now_s, joining=max(0, min(ready, room)), awaits=awaits, until_s=until_s)
        if cycle.outcome is not None:
            self._end_for(nodes, cycle)
        if cycle.outcome is not None and cycle.verdict is None:
            left, first = self._next_cycle.nodes_left(cycle), printer(cycle, nodes, may_be_away=True)
            cycle.judge(now_s, nodes_left=left, awaits=awaits, printer=first.instance if first else "")
        if cycle.verdict is not None and not cycle.is_told:
            self._out.append(Send(list(self._links), cycle.verdict))
            cycle.is_told = True
        self._alarms.append(cycle.alarm_s)

    def _end_for(self, nodes: Iterable[Node], cycle: JobCycle) -> None:
        running = {node.link: node for node in nodes if node.phase is m.NodePhase.RUNNING and node.link is not None}
        for node in running.values():
            node.phase = m.NodePhase.BUSY
        if running:
            self._end = self._end or cycle.end(nodes_left=self._next_cycle.nodes_left(cycle))
            self._out.append(Send([*running], self._end))
