"""A launcher's side of the control plane, without I/O: it finds the coordinator, and follows it.

The owner of the socket calls ``opened``, ``failed``, ``broken`` and ``heard``, and ``tick`` when ``alarm_s`` is over;
the launcher reports its ranks by ``tell``. Each returns what to do.
Training goes on without a coordinator for ``CUT_OFF_S`` more than a silence takes to be noticed: then the others
probably go on without this node, and its ranks are terminated.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from megatron_ft.core.diagnosis.waits import Lags
from megatron_ft.core.facts.launcher import Cause, NodeLost
from megatron_ft.core.job import actions, give_up_policy
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.coordinator_locator import CoordinatorLocator
from megatron_ft.core.job.decisions import AcceptorState, Assignment, CoordinatorHost, DecisionKind, Term
from megatron_ft.core.job.liveness import OwnClock, beat_s, lost_s
from megatron_ft.core.job.restart_policy import NodeState, Outcome
from megatron_ft.core.memory.snapshots import Complete, CopyTo, KeeperPort, Passed, Saved
from megatron_ft.learning.messages import Intervals, Killed, Survey

CUT_OFF_S = 15.0
"""Added to the time in which silence is noticed: another coordinator has taken over by then, if one can."""
MOVED_S = 3.0
"""Between two `Moved` of one launcher; what it said holds for three times as long."""
_CONNECT_S = 2.0
_PATIENCE_S = (2.0, 4.0)
"""How long to wait for a coordinator that can't lead yet: at random, so that all launchers meet at one in the end."""
_IMPATIENCE_S = (0.1, 0.5)
"""Seconds to wait, at random, for a coordinator that few have reached."""
_GATHERING_S = (5.0, 6.5)
"""Seconds to wait, at random, for the first coordinator, if the other nodes needed have reached it, too."""
_RETRY_S = (0.02, 0.2)
_MOST_SAVED = 8
"""Snapshots of which a coordinator that takes over is told; a node has no memory for as many."""


class Member:
    """The control plane of one launcher. Times are seconds of any clock that doesn't go back."""

    def __init__(self, identity: m.Identity, *, now_s: float, chance: random.Random) -> None:
        self.identity = identity
        self.memory = AcceptorState()
        self.standing = m.NodeStatus()
        self.is_led = False
        self._owned: frozenset[str] = frozenset()
        """Addresses at which every coordinator is this launcher's own."""
        self._led_by: CoordinatorHost | None = None
        """The node beside the coordinator that it follows, or followed last."""
        self._found_silent: CoordinatorHost | None = None
        self._chance = chance
        self._clock = OwnClock(now_s)
        self._out: list[actions.MemberEffect] = []
        self._search = CoordinatorLocator(identity.endpoints, own=identity.address)
        self._session = 0
        self._connect_s = max(_CONNECT_S, beat_s(identity.rules.max_nodes))  # thousands may come at once
        self._is_open = self._is_answered = self._has_lost_lead = False
        self._retry_s: float | None = 0.0
        self._until_s: float | None = None
        self._announce_s: float | None = None
        self._heard_s = self._beat_s = self._unled_s = self._joined_s = 0.0
        self._leaving: m.Goodbye | None = None
        self._leave_s: float | None = None
        self._is_over = False
        self._is_cut_off = self._has_said_unreached = False

    @property
    def alarm_s(self) -> float:
        """When ``tick`` is to be called at the latest, by the caller's clock."""
        times = [self._retry_s, self._until_s, self._leave_s, self._announce_s]
        if self._is_open:
            times += [self._beat_s, self._heard_s + self._lost_s]
        if not self.is_led:
            times.append(self._unled_s + (self._patience_s() if self._is_cut_off else self._lost_s + CUT_OFF_S))
        return self._clock.callers_s(min(time for time in times if time is not None))

    @property
    def led_at(self) -> str:
        """The address of the coordinator that this launcher follows; empty if it follows none."""
        return self._search.home if self.is_led else ""

    @property
    def place(self) -> int | None:
        return None if self.memory.decided is None else self.memory.decided.place

    # -- the connection ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        now = self._clock.now_s
        if self._leave_s is not None and now >= self._leave_s:
            self._unanswered()
        if self._retry_s is not None and now >= self._retry_s:
            self._connect()
        elif self._until_s is not None and now >= self._until_s:
            if self._has_lost_lead or not self._is_answered:
                self._search.found_silent(now)
            self._seek()
        elif self._is_open and now >= self._heard_s + self._lost_s:
            self._search.begin_again()
            self._note_silence(self.is_led)
            self._seek(at_once=True)
        elif self._is_open and now >= self._beat_s:
            self._beat_s = now + beat_s(self._nodes)
            self._out.append(actions.Transmit(m.Beat()))
        if not self.is_led:
            self._look_whether_cut_off()
        if self._announce_s is not None and now >= self._announce_s:
            self._announce()
        return self._take()

    def opened(self, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._is_open = True
        self._search.reached()
        self._heard_s = self._clock.now_s
        self._beat_s = self._clock.now_s + beat_s(self._nodes)
        self._until_s, self._is_answered = self._clock.now_s + self._connect_s, False
        self._session += 1
        hello = self.identity.hello(
            self._session,
            owns=self._search.address in self._owned and self.standing.phase is not m.NodePhase.EXCLUDED,
            memory=self.memory,
            standing=self.standing,
            found_silent=self._found_silent,
            now_s=now_s,
        )
        self._out.append(actions.Transmit(hello))
        if self._leaving is not None:
            self._out.append(actions.Transmit(self._leaving))
        return self._take()

    def failed(self, now_s: float, problem: str = "", *, is_unowned: bool = True) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        if not is_unowned:
            self._search.reached()
        self._seek(problem=problem)
        return self._take()

    def broken(self, now_s: float, *, silent: bool = False) -> list[actions.MemberEffect]:
        """The connection has ended. ``silent``: no packet is answered any more from there."""
        self._clock.set(now_s)
        was_led, self._is_open = self.is_led, False
        self._search.reached()
        if was_led:
            self._search.begin_again(is_home_there=not silent)
        if silent:
            self._note_silence(was_led)
        self._seek(at_once=was_led, problem="" if silent else "the connection was closed there")
        return self._take()

    def _note_silence(self, was_led: bool) -> None:
        """The host of a coordinator doesn't answer any more; ``was_led``: of the one that this launcher follows."""
        self._search.found_silent(self._clock.now_s)
        if was_led:
            self._found_silent = self._led_by

    def owns(self, *addresses: str) -> None:
        """Every coordinator at one of these addresses is started by this launcher."""
        self._owned = frozenset(addresses)

    def _seek(self, *, at_once: bool = False, problem: str = "") -> None:
        if self._is_open:
            self._out += [actions.Transmit(m.Away())] if self.is_led else []
            self._out.append(actions.Disconnect())
        self._search.tried(self._clock.now_s, is_answered=self._is_answered, problem=problem)
        self._unled()
        self._is_open, self._until_s = False, None
        wait_s = 0.0 if at_once else self._chance.uniform(*_RETRY_S)
        self._retry_s = self._clock.now_s + wait_s

    def _connect(self) -> None:
        address = self._search.next(knows_job=self.memory.decided is not None, now_s=self._clock.now_s)
        self._retry_s, self._until_s = None, self._clock.now_s + self._connect_s
        self._is_answered = self._has_lost_lead = False
        self._out.append(actions.Connect(address))

    def _unled(self) -> None:
        self._announce_s = None
        if self.is_led:
            self.is_led, self._unled_s = False, self._clock.now_s

    def _announce(self) -> None:
        """The coordinator has moved: some launchers say so at the first address, for launchers that start again."""
        first, own = self.identity.endpoints[0], self.identity.address
        self._announce_s = None if self.led_at == first else self._clock.now_s + MOVED_S
        if self._announce_s is not None and (own in (first, self.led_at) or self.place == 0):
            self._out.append(actions.Announce(first, self._moved()))

    def _moved(self) -> m.Moved:
        decided = self.memory.decided
        founding, number = (None, -1) if decided is None else (decided.decision.founding, decided.decision.number)
        return m.Moved(self.identity.job, self.led_at, founding, number, self._clock.now_s - self._joined_s)

    def _look_whether_cut_off(self) -> None:
        unled_s = self._clock.now_s - self._unled_s
        if not self._is_cut_off and unled_s >= self._lost_s + CUT_OFF_S:
            self._is_cut_off = True
            if self.standing.phase is m.NodePhase.RUNNING:
                text = f"no coordinator reachable for {unled_s:.0f} s (network failure, or too few nodes left)"
                report = m.Report(self.standing.cycle, NodeState.UNHEALTHY, Cause(text=text, follows=True))
                self.standing = replace(self.standing, phase=m.NodePhase.BUSY, report=report)
                self._out += [actions.Transmit(report)] if self._is_open else []  # its hello said that the ranks run
                self._out.append(actions.Say(f"{text}: terminating the ranks of this node; other nodes may continue"))
                end = m.End(
                    self.standing.cycle, Outcome.MEMBERSHIP, restarts=True, lost=True, text=text, is_cut_off=True
                )
                self._out.append(end)
        if (
            not self._has_said_unreached
            and unled_s >= give_up_policy.report_unreached_s(self.identity)
            and self._is_new
        ):
            self._has_said_unreached = True
            self._out.append(actions.Say(give_up_policy.unreached(self.identity, self._search.problems)))
        if unled_s >= self._patience_s() and self.standing.phase is not m.NodePhase.RUNNING:
            gives_up = give_up_policy.give_up(
                self.identity,
                self.memory,
                self.standing,
                self._search.problems,
                is_unowned=self._search.is_unowned,
            )
            self._leave(gives_up.code, gives_up.text)

    @property
    def _is_new(self) -> bool:
        return give_up_policy.is_new(self.memory, self.standing)

    def _patience_s(self) -> float:
        return give_up_policy.patience_s(self.identity, self.memory, self.standing)

    def _unanswered(self) -> None:
        """No coordinator has answered the goodbye: whether the job goes on isn't known."""
        if self._leaving is not None and self._leaving.excluded:
            self._stay()
        else:
            self._leave(1 if self._leaving is None else self._leaving.code, "")

    def _stay(self) -> None:
        """This node is excluded. Its launcher connects again under another instance, which neither votes nor trains."""
        self.identity, self.memory = self.identity.excluded(), AcceptorState()
        self.standing = m.NodeStatus(phase=m.NodePhase.EXCLUDED, report=self.standing.report)
        self._leaving = self._leave_s = None
        self.is_led, self._is_cut_off, self._unled_s = False, False, self._clock.now_s
        self._out.append(actions.LeftOut())
        self._seek(at_once=True)

    def _leave(self, code: int, text: str, *, is_of_all: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            self._out.append(actions.Leave(code, text, is_of_all))

    # -- messages of the coordinator --------------------------------------------------------------------------

    def heard(self, message: m.ToMember, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._heard_s, self._is_answered = self._clock.now_s, True
        self._search.reached()
        match message:
            case m.Lead(term, beside):
                self._follow(term)
                self._led_by, self._found_silent = beside, None
            case m.Wait():
                self._waits(message)
            case m.Propose():
                self._proposed(message)
            case m.Commit():
                self._committed(message)
            case m.Rival(address):
                self._out.append(actions.Announce(address, self._moved()))
            case m.Stay() if self._leaving is not None:
                self._stay()
            case m.Dismiss(m.REFUSED, text) if (
                self.memory.decided or self._search.address != self.identity.endpoints[0]
            ):
                # another job may have got the port of a lost coordinator, or of one still to come
                self._seek(problem=text)
            case m.Dismiss(code, text):
                self._leave(code, text)
            case _:
                self._heard_of_cycle(message)
        return self._take()

    def _heard_of_cycle(self, message: m.ToMember) -> None:
        match message:
            case m.End():
                self._ended(message)
            case m.Verdict():
                if message.cycle == self.standing.cycle:
                    self.standing = replace(self.standing, verdict=message)
                self._out.append(message)
            case m.DiagnoseHang(cycle) | m.Reviewed(cycle) | Lags(cycle) if self._is_running(cycle):
                self._out.append(message)
            case Survey(cycle) if self._is_running(cycle):
                self._out.append(message)
            case Intervals() | Killed() if message.cycle == self.standing.cycle:
                # also right after its end: that a timeout is doubled counts for the next cycle
                self._out.append(message)
            case Complete(key) | Passed(key) if self._is_running(key.cycle):
                waiting = tuple(each for each in self.standing.saved if each > key)
                complete = key if isinstance(message, Complete) else self.standing.complete
                self.standing = replace(self.standing, complete=complete, saved=waiting)
                self._out.append(message)
            case CopyTo(cycle) if self._is_running(cycle):
                self._out.append(message)
            case m.Tell() | m.PrintJobLines() | NodeLost():
                self._out.append(message)

    def _is_running(self, cycle: int) -> bool:
        return cycle == self.standing.cycle and self.standing.phase is m.NodePhase.RUNNING

    def _follow(self, term: Term) -> None:
        if self._leaving is not None:
            return  # a launcher that has said goodbye to one coordinator votes at no other
        if term < self.memory.promised:
            self._out.append(actions.Transmit(m.Newer(self.memory.promised)))
            return
        self.memory = self.memory.follow(term)
        self.is_led, self._is_cut_off, self._until_s = True, False, None
        self._search.found()
        if self._owned - {self._search.address}:
            self._out.append(actions.KillCoordinators(self._search.address))
        self._out.append(actions.Transmit(m.Follow(term, self.memory.accepted)))
        self._announce()

    def _waits(self, wait: m.Wait) -> None:
        self._has_lost_lead |= self.is_led
        self._unled()
        if self._search.told_of(wait.elsewhere, self._clock.now_s, wait.age_s):
            self._seek(at_once=True)
            return
        is_common = self._search.is_first and self.memory.decided is not None
        patience_s = _PATIENCE_S if wait.soon or is_common else _IMPATIENCE_S
        wait_s = self._chance.uniform(*(_GATHERING_S if wait.gathers and is_common else patience_s))
        self._until_s = self._clock.now_s + wait_s

    def _proposed(self, proposal: m.Propose) -> None:
        if self._leaving is not None or not self.memory.may_accept(proposal.ballot, proposal.decision):
            return
        self._search.candidates(proposal.candidates, are_decided=False)
        held = Assignment(proposal.decision, proposal.place, proposal.votes)
        self.memory = self.memory.accept(proposal.ballot, held)
        if held.place == 0 and held.decision.kind is DecisionKind.CYCLE:
            self._out.append(actions.OpenStore(held))
        else:
            self._out.append(actions.Transmit(m.Accept(proposal.ballot)))

    def store_opened(self, held: Assignment, address: str, now_s: float) -> list[actions.MemberEffect]:
        """The store that ``OpenStore`` asked for listens at ``address``."""
        self._clock.set(now_s)
        accepted, votes = self.memory.accepted, self._is_open and self._leaving is None
        if accepted is not None and accepted.held.decision == held.decision and votes:
            self._out.append(actions.Transmit(m.Accept(accepted.ballot, address)))
        return self._take()

    def _committed(self, commit: m.Commit) -> None:
        decision = commit.decision
        self._search.candidates(commit.candidates)
        self._led_by = commit.beside
        if decision.number <= self.memory.number:
            return
        if self.memory.decided is None:
            self._joined_s = self._clock.now_s
        held = replace(self.memory.held(decision, self.identity.instance) or Assignment(decision), store=commit.store)
        self.memory = self.memory.learn(held)
        if decision.kind is DecisionKind.END:
            end = give_up_policy.at_end(self.identity, decision, self.standing)
            self._leave(end.code, end.text, is_of_all=end.is_of_all)
        elif held.starts_ranks(self.standing.cycle):
            self.standing = m.NodeStatus(phase=m.NodePhase.RUNNING, cycle=decision.cycle)
            self._out.append(actions.Begin(held))
        elif decision.kind is DecisionKind.CYCLE:
            self._out.append(actions.StandBy())

    def _ended(self, end: m.End) -> None:
        if end.cycle != self.standing.cycle:
            return
        was_running = self.standing.phase is m.NodePhase.RUNNING
        self.standing = self.standing.after_end(None if end.lost else end.outcome, end.text)
        if was_running or end.lost:
            self._out.append(end)

    # -- reports of this node ---------------------------------------------------------------------------------

    def tell(self, message: m.NodeMessage, now_s: float) -> list[actions.MemberEffect]:
        """Report the state of this node or its ranks; ``Leave`` follows a `Goodbye` within its ``within_s``.

        A later coordinator is told the state of the node again, but not the events of its ranks.
        """
        self._clock.set(now_s)
        match message:
            case m.Report():
                self.standing = replace(self.standing, report=message)
            case m.Ready(kept):
                self.standing = replace(self.standing, phase=m.NodePhase.READY, kept=kept)
            case m.StockTaken(kept) if self.standing.phase is m.NodePhase.READY:
                self.standing = replace(self.standing, kept=kept)
            case Saved(key) if key.cycle == self.standing.cycle:
                self.standing = replace(self.standing, saved=(*self.standing.saved, key)[-_MOST_SAVED:])
            case KeeperPort(cycle, port) if cycle == self.standing.cycle:
                self.standing = replace(self.standing, keeper_port=port)
            case m.Restored(cycle) if cycle == self.standing.cycle:
                self.standing = replace(self.standing, restored=True)
            case m.NodeUnfit():
                self.standing = replace(self.standing, phase=m.NodePhase.ASIDE)
            case m.Shutdown(text):
                self.standing = replace(self.standing, shutdown=text)
            case m.Goodbye():
                self._leaving, self._leave_s = message, self._clock.now_s + message.within_s
        if self._is_open:  # else the next hello says it
            self._out.append(actions.Transmit(message))
        return self._take()

    @property
    def _nodes(self) -> int:
        return 0 if self.memory.decided is None else self.memory.decided.decision.world

    @property
    def _lost_s(self) -> float:
        return lost_s(self._nodes)

    def _take(self) -> list[actions.MemberEffect]:
        taken = self._out[:]
        self._out.clear()
        return taken
