"""A launcher's side of the control plane, without I/O: it connects to the leader at the job's endpoint, and follows it.

The owner of the socket calls ``opened``, ``broken`` and ``heard``, and ``tick`` when ``alarm_s`` is over; the launcher
reports its ranks by ``tell``. Each returns what to do.
Training goes on without a leader as long as ranks of this node make progress, for ten minutes at most: the others then
do, too. If they have made none for ``STALLED_S``, or for ``CUT_OFF_S`` where that isn't known, the others probably go
on without this node, and its ranks are terminated.
"""

from __future__ import annotations

import enum
import math
import random

from msgspec.structs import replace

from megatron_ft.exit_codes import MISTAKE_CODE, TRY_AGAIN_CODE
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, DecisionKind
from megatron_ft.job.rules.liveness import STALLED_S, OwnClock, beat_s, excused_s, lost_s
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome
from megatron_ft.link.base.codec import PartMessage, Parts
from megatron_ft.link.facts.launcher import Cause, NodeLost

CUT_OFF_S = 30.0
"""Time since the leader's last message after which a node counts as cut off, where its ranks tell of no progress."""
_CONNECT_S = 2.0
_ANSWER_S = 5.0
"""Seconds from a hello to its answer: the leader may just be starting."""
_RETRY_S = (0.02, 0.5)
"""Pause before the next attempt to connect, for each second between beats, at least and at most."""
HOLDER_STAYS_S = 60.0
"""Seconds for which the launcher that holds the lock stays so that all others hear of the job's end."""
_EXCLUDED_S = 30.0
"""Seconds for which an excluded node's goodbye waits for a coordinator that takes over."""
_REPORT_UNREACHED_S = 10.0
"""Seconds after which a launcher that no leader has admitted tells the user why."""
TAKEN_S = 20.0
"""Seconds after which the program that has the endpoint's port is no leader that is just starting."""


class Link(enum.Enum):
    """State of the connection to the leader. When its time is over, the next one follows."""

    NONE = "none"
    """Until the next attempt."""
    CONNECTING = "connecting"
    """Until the attempt is given up."""
    OPEN = "open"
    """The hello is sent; until an answer is awaited no more."""
    LED = "led"
    """A leader has admitted this launcher; until the next beat, or the leader has been silent for too long."""


class Member:
    """The control plane of one launcher. Times are seconds of any clock that doesn't go back."""

    def __init__(self, identity: m.Identity, *, now_s: float, chance: random.Random) -> None:
        self.identity = identity
        self.decided: Assignment | None = None
        """The last decision, as this launcher has it."""
        self.standing = m.NodeStatus()
        self.has_given_up = False
        """True if this launcher has never had a part in the job, and has looked in vain until the join timeout."""
        self.owns = False
        """This launcher holds the lock: every leader at the endpoint is its own."""
        self._address, self._epoch = identity.endpoint, 0
        """Address of the leader, and the highest epoch that this launcher has heard of."""
        self._chance = chance
        self._clock = OwnClock(now_s)
        self._out: list[actions.MemberEffect] = []
        self._link, self._due_s = Link.NONE, math.inf if identity.is_in_etcd else 0.0
        """The connection, and when the time of its state is over."""
        self.problem = "still connecting"
        """Why no leader was reached, for the user."""
        self.was_reached = False
        """A coordinator has proved that it knows the secret: it is no mistake of the user if another process can't."""
        self._heard_s = self._unled_s = 0.0
        self._stopped_s = 0.0
        """When the ranks of this node were ended because it was cut off."""
        self._progress = 0
        """Count of iterations begun and collectives completed by the ranks of this cycle."""
        self._progress_s: float | None = None
        """When that count was seen to rise last; None: it never did."""
        self._leaving: m.Goodbye | None = None
        self._leave_s = math.inf
        self._is_opening = False
        """The node is ready, and its store is being opened."""
        self._has_said_unreached = False

    @property
    def alarm_s(self) -> float:
        """When ``tick`` is to be called at the latest, by the caller's clock; a second from now at most."""
        return self._clock.callers_s(min(self._due_s, self._leave_s))

    @property
    def is_led(self) -> bool:
        """True if a leader has admitted this launcher."""
        return self._link is Link.LED

    # -- the connection ---------------------------------------------------------------------------------------

    def tick(self, now_s: float, progress: int | None = None) -> list[actions.MemberEffect]:
        """Do what is due. ``progress``: count of iterations begun and collectives completed by the ranks so far."""
        self._clock.set(now_s)
        now = self._clock.now_s
        if progress is not None and self.standing.phase is m.NodePhase.RUNNING:
            self._progress_s = now if progress > self._progress else self._progress_s
            self._progress = progress  # less than before if a rank has ended
        if self._leaving is not None and now >= self._leave_s:  # no leader has answered: the job may go on, or not
            self._leave_s = math.inf
            if self._leaving.excluded:
                self._stay()
            else:
                self._out.append(m.Dismiss(self._leaving.code))
        if now >= self._due_s:
            match self._link:
                case Link.NONE:
                    self._link = Link.CONNECTING
                    self._due_s = now + max(_CONNECT_S, beat_s(self.identity.rules.max_nodes))
                    self._out.append(actions.Connect(self._address))
                case Link.LED if now < self._heard_s + lost_s(self._nodes):
                    self._due_s = now + beat_s(self._nodes)
                    age_s = None if self._progress_s is None else now - self._progress_s
                    self._out.append(actions.Transmit(m.Beat(progress_s=age_s)))
                case _:
                    self._reconnect("no answer, from it or from a name server")
        if not self.is_led:
            self._look_whether_cut_off()
        return self._take()

    def leader_at(self, address: str, epoch: int, revision: int, now_s: float) -> list[actions.MemberEffect]:
        """Follow the leader that etcd names; ``epoch`` 0: none. ``revision``: that of etcd's store."""
        self._clock.set(now_s)
        if not self.identity.since:
            self.identity = replace(self.identity, since=revision)
        if epoch > self._epoch:
            self._address, self._epoch = address, epoch
            self._reconnect("another launcher has taken over")
            self._due_s = self._clock.now_s
        elif not epoch:
            self.problem = "no launcher leads the job"
        return self._take()

    def opened(self, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._link, self._due_s, self.was_reached = Link.OPEN, self._clock.now_s + _ANSWER_S, True
        up_s = max(0.0, now_s - self.identity.started_s)
        hello = replace(self.identity, owns=self.owns, decided=self.decided, standing=self.standing, up_s=up_s)
        self._transmit(hello, *([] if self._leaving is None else [self._leaving]))
        return self._take()

    def broken(self, now_s: float, problem: str = "the connection was closed there") -> list[actions.MemberEffect]:
        """The connection has ended, or can't be made."""
        self._clock.set(now_s)
        self._reconnect(problem)
        return self._take()

    def _reconnect(self, problem: str = "") -> None:
        self.problem = problem or self.problem
        self._unled_s = self._heard_s if self.is_led else self._unled_s
        if self.standing.store and self._link in (Link.OPEN, Link.LED):
            # a decision that is on its way may have given it to other nodes' ranks
            self.standing, self._is_opening = replace(self.standing, phase=m.NodePhase.BUSY, store=""), True
            self._out.append(actions.OpenStore())
        pause_s = beat_s(self.identity.rules.max_nodes) * self._chance.uniform(*_RETRY_S)
        self._link, self._due_s = Link.NONE, self._clock.now_s + pause_s
        self._out.append(actions.Connect())

    def _transmit(self, *messages: m.FromMember) -> None:
        if self._link in (Link.OPEN, Link.LED):  # else the next hello says it
            self._out += map(actions.Transmit, messages)

    def _look_whether_cut_off(self) -> None:
        now, rules = self._clock.now_s, self.identity.rules
        unled_s = now - self._unled_s
        progress_s = None if rules.min_healthy else self._progress_s
        going = () if progress_s is None else (now < progress_s + STALLED_S,)
        # the leader judges a silent node in the same way
        if self._is_training and unled_s >= excused_s(self._nodes, going, untold_s=CUT_OFF_S):
            self._stopped_s = now
            text = f"no coordinator reachable for {unled_s:.0f} s (network failure, or its host is lost)"
            self._out.append(m.Tell(f"{text}: terminating the ranks of this node; other nodes may continue"))
            self._ended(m.End(self.standing.cycle, Outcome.MEMBERSHIP, True, lost=True, text=text, is_cut_off=True))
            if self._link is Link.OPEN:  # its hello said that the ranks run
                self._reconnect()
        timeout = f"{rules.join_timeout_s:g} s (--rdzv-conf join_timeout)"
        problem = f"{self.identity.endpoint}: {self.problem}"
        is_taken = self.identity.is_here and not self.owns and not self.was_reached  # no leader has answered
        if not (self._has_said_unreached or is_taken) and self._is_new and unled_s >= _REPORT_UNREACHED_S:
            self._has_said_unreached = True
            self._out.append(m.Tell(f"no coordinator reached ({problem}); trying for {timeout}"))
        if is_taken and unled_s >= TAKEN_S:
            endpoint = self.identity.endpoint
            text = f"another program has the port of the rendezvous endpoint {endpoint} on this machine: end it"
            shows = f"`ss -ltnp sport = :{endpoint.rpartition(':')[2]}` shows it"
            self._out.append(m.Dismiss(MISTAKE_CODE, f"{text} ({shows}), or choose another port"))
        until_s = max(self._unled_s, self._stopped_s) + rules.join_timeout_s
        if rules.launchers > 0 and not self._is_new and not self.identity.is_in_etcd:
            # a leader that is lost with its host doesn't come back where the scheduler starts no single launcher again
            until_s = self._unled_s + CUT_OFF_S
        if now >= until_s and not self._is_training:
            self._give_up(problem, timeout)

    def _give_up(self, problem: str, timeout: str) -> None:
        """Leave: the time is over. An endpoint that nobody has ever held is a mistake, unless a scheduler named it."""
        verdict, self.has_given_up = self.standing.verdict, self._is_new
        code, text = TRY_AGAIN_CODE, f"no coordinator reached for {timeout} ({problem})"
        if verdict is not None and verdict.decision.action is not Action.RESTART:
            code, text = verdict.code, verdict.cause.text
        elif self.standing.phase is m.NodePhase.EXCLUDED:
            # the other nodes may still train, and a scheduler may end their job at any other code
            code, text = 0, "no coordinator is reachable any more"
        elif not self._is_new:
            text = f"no coordinator reachable that can continue the job ({problem}): start the job again"
        elif not (self.was_reached or self.identity.has_known_host):
            text = (
                f"no coordinator was reached at {self.identity.endpoint} for {timeout} ({problem}), and this launcher"
            )
            text = f"{text} is not on its host: start a launcher there, or set --rdzv-conf is_host=1 on one node"
            code = MISTAKE_CODE
        self._out.append(m.Dismiss(code, text))

    @property
    def _is_new(self) -> bool:
        """True if this launcher has had no part in a decision of the job yet."""
        return self.decided is None and self.standing.phase is not m.NodePhase.EXCLUDED

    @property
    def _is_training(self) -> bool:
        """True if this node has a part in a cycle, and not all of its ranks have finished."""
        report = self.standing.report
        has_finished = report is not None and report.state is NodeState.SUCCEEDED
        return self.standing.phase is m.NodePhase.RUNNING and not has_finished

    def _stay(self) -> None:
        """This node is excluded, and never trains again. Its launcher connects again, to hear of the end."""
        self.decided = None
        self.standing = m.NodeStatus(phase=m.NodePhase.EXCLUDED, report=self.standing.report)
        self._leaving, self._leave_s = None, math.inf
        self._out.append(m.Stay())
        self._reconnect()
        self._unled_s = self._clock.now_s

    # -- messages of the leader ---------------------------------------------------------------------------------

    def heard(self, message: m.ToMember, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._heard_s = self._clock.now_s
        match message:
            case m.Admitted(epoch) if epoch < self._epoch:
                self._reconnect("it leads no more")
            case m.Admitted(epoch):
                self._epoch = epoch
                self._link, self._due_s = Link.LED, self._heard_s + beat_s(self._nodes)
            case m.Beat(number):
                self._out += [actions.Transmit(message)] if number else []
            case Assignment():
                self._decided(message)
            case m.Stay():
                if self._leaving is not None:
                    self._stay()
            case m.Dismiss(code, text) if code == MISTAKE_CODE and self.decided is not None:
                self._reconnect(text)  # another job has got the endpoint, after the leader was lost
            case m.Dismiss():
                self._out.append(message)
            case m.End():
                self._ended(message)
            case _:
                self._note(message)
                self._out.append(message)
        return self._take()

    def _note(self, message: m.Verdict | PartMessage | m.Tell | NodeLost) -> None:
        """Keep what the next leader is to be told."""
        if isinstance(message, m.Verdict) and message.cycle == self.standing.cycle:
            self.standing = replace(self.standing, verdict=message)
        elif isinstance(message, PartMessage):
            self.standing = replace(self.standing, parts=message.noted(self.standing.parts, self.standing.cycle))

    def _decided(self, held: Assignment) -> None:
        decision, last = held.decision, self.decided
        if last is not None and last.decision.id == decision.id:
            return
        self.decided = held
        if decision.kind is DecisionKind.END:
            end = m.Dismiss(decision.code, decision.text, is_of_all=True, printer=decision.printer)
            has_part = self.standing.cycle >= 0 or self.standing.phase is m.NodePhase.EXCLUDED
            if decision.code == 0 and decision.world and not (has_part or self.identity.is_named):
                text = f"{self.identity.job} has finished without this launcher, and may have been another job: nothing"
                text = f"{text} was trained here. Give each job its own --rdzv-id (and endpoint), and the launchers of"
                end = m.Dismiss(MISTAKE_CODE, f"{text} one job, spares included, the same", printer=decision.printer)
            self._out.append(end)
        elif self._leaving is None:  # else the decision crossed the goodbye
            if held.place is not None:
                self._is_opening, self.standing = False, m.NodeStatus(m.NodePhase.RUNNING, decision.cycle)
                self._progress, self._progress_s = 0, None
            self._out.append(held)

    def _ended(self, end: m.End) -> None:
        if end.cycle != self.standing.cycle:
            return
        was_running = self.standing.phase is m.NodePhase.RUNNING
        phase = m.NodePhase.BUSY if was_running else self.standing.phase
        if end.lost:  # another leader mustn't take this node for one that trains
            report = m.Report(end.cycle, NodeState.UNHEALTHY, Cause(text=end.text, follows=True))
            self.standing = replace(self.standing, phase=phase, report=report)
        else:
            self.standing = replace(self.standing, phase=phase, ended=end.outcome)
        if was_running or end.lost:
            self._out.append(end)

    # -- reports of this node ---------------------------------------------------------------------------------

    def tell(self, message: m.NodeMessage, now_s: float) -> list[actions.MemberEffect]:
        """Report the state of this node or its ranks; `Dismiss` or `Stay` follows a `Goodbye`.

        A later leader is told the state of the node again, but not the events of its ranks.
        """
        self._clock.set(now_s)
        match message:
            case m.Ready(parts):
                self._get_ready(parts)
                return self._take()
            case m.Report():
                self.standing = replace(self.standing, report=message)
            case m.Shutdown(text):
                self.standing = replace(self.standing, shutdown=text)
            case m.NodeUnfit():
                self.standing = replace(self.standing, phase=m.NodePhase.ASIDE)
            case m.Goodbye():
                self._leaving, self._is_opening = message, False
                within_s = HOLDER_STAYS_S if self.owns else m.GOODBYE_S
                self._leave_s = self._clock.now_s + (_EXCLUDED_S if message.excluded else within_s)
            case PartMessage():
                self._note(message)
        self._transmit(message)
        return self._take()

    def _get_ready(self, parts: Parts) -> None:
        """Open a store, and say then where; no store if no cycle follows. Parts may change while the node is ready."""
        verdict = self.standing.verdict
        if self.standing.phase is m.NodePhase.RUNNING:
            return  # the message has crossed a decision
        self.standing = replace(self.standing, parts=self.standing.parts.updated(*parts))
        if self.standing.store or (verdict is not None and verdict.decision.action is not Action.RESTART):
            self._ready(self.standing.store)
        elif not self._is_opening:
            self._is_opening = True
            self._out.append(actions.OpenStore())

    def store_opened(self, address: str, now_s: float) -> list[actions.MemberEffect]:
        """The store that ``OpenStore`` asked for listens at ``address``."""
        self._clock.set(now_s)
        if self._is_opening:
            self._is_opening = False
            self._ready(address)
        return self._take()

    def _ready(self, store: str) -> None:
        self.standing = replace(self.standing, phase=m.NodePhase.READY, store=store)
        self._transmit(m.Ready(self.standing.parts, store))

    @property
    def _nodes(self) -> int:
        return 0 if self.decided is None else self.decided.decision.world

    def _take(self) -> list[actions.MemberEffect]:
        taken, self._out = self._out, []
        return taken
