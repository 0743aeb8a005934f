"""A launcher's side of the control plane, without I/O: it connects to the leader at the job's endpoint, and follows it.

The owner of the socket calls ``opened``, ``failed``, ``broken`` and ``heard``, and ``tick`` when ``alarm_s`` is over;
the launcher reports its ranks by ``tell``. Each returns what to do.
Training goes on without a leader as long as ranks of this node make progress, for ten minutes at most: the others then
do, too. If they have made none for ``STALLED_S``, or for ``CUT_OFF_S`` where that isn't known, the others probably go
on without this node, and its ranks are terminated.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from megatron_ft.exit_codes import MISTAKE_CODE, TRY_AGAIN_CODE
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.liveness import STALLED_S, OwnClock, beat_s, excused_s, lost_s
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome
from megatron_ft.link.base.codec import PartMessage, Parts
from megatron_ft.link.facts.launcher import Cause, NodeLost

CUT_OFF_S = 30.0
"""Time since the leader's last message after which a node counts as cut off, where its ranks tell of no progress."""
_CONNECT_S = 2.0
_ANSWER_S = 5.0
"""Seconds from a hello to its answer: the leader may just be starting."""
_RETRY_S = (0.02, 0.2)
_LONGEST_RETRY_S = 1.0
HOLDER_STAYS_S = 60.0
"""Seconds for which the launcher that holds the lock stays so that all others hear of the job's end."""
_REPORT_UNREACHED_S = 10.0
"""Seconds after which a launcher that no leader has admitted tells the user why."""
TAKEN_S = 20.0
"""Seconds after which the program that has the endpoint's port is no leader that is just starting."""


class Member:
    """The control plane of one launcher. Times are seconds of any clock that doesn't go back."""

    def __init__(self, identity: m.Identity, *, now_s: float, chance: random.Random) -> None:
        self.identity = identity
        self.decided: Assignment | None = None
        """The last decision, as this launcher has it."""
        self.standing = m.NodeStatus()
        self.is_led = self.has_given_up = False
        """A leader has admitted it; it has never had a part in the job, and looked in vain until the join timeout."""
        self.owns = False
        """This launcher holds the lock: every leader at the endpoint is its own."""
        self._address, self._epoch = "" if identity.is_in_etcd else identity.endpoint, 0
        """Address of the leader, empty while none is known; and the highest epoch that this launcher has heard of."""
        self._chance = chance
        self._clock = OwnClock(now_s)
        self._out: list[actions.MemberEffect] = []
        self._is_open = False
        self._retry_s: float | None = 0.0
        """When to connect next."""
        self._until_s: float | None = None
        """When to give up a connection that is being made, or a hello without an answer."""
        self._tries = 0
        self._problem = "still connecting"
        self._is_unowned = True
        """No process was ever reached at the endpoint, whose name is known."""
        self._heard_s = self._beat_s = self._unled_s = 0.0
        self._stopped_s = 0.0
        """When the ranks of this node were ended because it was cut off."""
        self._progress = 0
        """Count of iterations begun and collectives completed by the ranks of this cycle."""
        self._progress_s: float | None = None
        """When that count was seen to rise last; None: it never did."""
        self._leaving: m.Goodbye | None = None
        self._leave_s: float | None = None
        self._opening: Parts | None = None
        """The node is ready, and its store is being opened."""
        self._is_over = False
        self._is_cut_off = self._has_said_unreached = False

    @property
    def alarm_s(self) -> float:
        """When ``tick`` is to be called at the latest, by the caller's clock."""
        times = [self._retry_s, self._until_s, self._leave_s]
        if self._is_open:
            times += [self._beat_s, self._heard_s + self._lost_s]
        if not self.is_led:
            times.append(self._gives_up_s if self._is_cut_off else self._cut_off_s)
            if self._progress_s is not None and self._clock.now_s < self._progress_s + STALLED_S:
                times.append(self._progress_s + STALLED_S)
        return self._clock.callers_s(min(time for time in times if time is not None))

    @property
    def place(self) -> int | None:
        return None if self.decided is None else self.decided.place

    @property
    def _cut_off_s(self) -> float:
        """When this node counts as cut off, by what is known now: the leader judges a silent node in the same way."""
        is_going = None if self._progress_s is None else self._clock.now_s < self._progress_s + STALLED_S
        going = () if is_going is None else (is_going,)
        return self._unled_s + excused_s(self._nodes, going, untold_s=CUT_OFF_S)

    # -- the connection ---------------------------------------------------------------------------------------

    def tick(self, now_s: float, progress: int | None = None) -> list[actions.MemberEffect]:
        """Do what is due. ``progress``: count of iterations begun and collectives completed by the ranks so far."""
        self._clock.set(now_s)
        now = self._clock.now_s
        if progress is not None and self.standing.phase is m.NodePhase.RUNNING:
            self._progress_s = now if progress > self._progress else self._progress_s
            self._progress = progress  # less than before if a rank has ended
        if self._leave_s is not None and now >= self._leave_s:
            self._unanswered()
        if self._retry_s is not None and now >= self._retry_s and not self._address:
            self._reconnect()
        elif self._retry_s is not None and now >= self._retry_s:
            self._retry_s, self._until_s = None, now + max(_CONNECT_S, beat_s(self.identity.rules.max_nodes))
            self._out.append(actions.Connect(self._address))
        elif self._until_s is not None and now >= self._until_s:
            self._reconnect("no answer, from it or from a name server")
        elif self._is_open and now >= self._heard_s + self._lost_s:
            self._reconnect("no answer any more")
        elif self._is_open and now >= self._beat_s:
            self._beat_s = now + beat_s(self._nodes)
            age_s = None if self._progress_s is None else now - self._progress_s
            self._out.append(actions.Transmit(m.Beat(progress_s=age_s)))
        if not self.is_led:
            self._look_whether_cut_off()
        return self._take()

    def leader_at(self, address: str, epoch: int, revision: int, now_s: float) -> list[actions.MemberEffect]:
        """Follow the leader that etcd names; ``epoch`` 0: none. ``revision``: that of etcd's store."""
        self._clock.set(now_s)
        if not self.identity.since:
            self.identity = replace(self.identity, since=revision)
        if epoch > self._epoch:
            self._address, self._epoch, self._tries = address, epoch, 0
            self._reconnect("another launcher has taken over")
            self._retry_s = self._clock.now_s
        elif not epoch:
            self.no_leader_known("no launcher leads the job")
        return self._take()

    def no_leader_known(self, problem: str) -> None:
        """Keep why, for the user; the leader that this launcher is connected to may lead all the same."""
        self._problem = self._problem if self.is_led else problem

    def opened(self, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        now = self._clock.now_s
        self._is_open, self._is_unowned = True, False
        self._heard_s, self._beat_s, self._until_s = now, now + beat_s(self._nodes), now + _ANSWER_S
        state = {"owns": self.owns, "decided": self.decided, "standing": self.standing}
        hello = self.identity.hello(now_s, **state)
        self._out.append(actions.Transmit(hello))
        if self._leaving is not None:
            self._out.append(actions.Transmit(self._leaving))
        return self._take()

    def failed(self, now_s: float, problem: str = "", *, is_unowned: bool = True) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._is_unowned = self._is_unowned and is_unowned
        self._reconnect(problem)
        return self._take()

    def broken(self, now_s: float) -> list[actions.MemberEffect]:
        """The connection has ended."""
        self._clock.set(now_s)
        self._is_open = False
        self._reconnect("the connection was closed there")
        return self._take()

    def _reconnect(self, problem: str = "") -> None:
        if self._is_open:
            self._out.append(actions.Disconnect())
        self._problem = problem or self._problem
        now = self._clock.now_s
        if self.is_led:
            self.is_led, self._unled_s, self._tries = False, self._heard_s, 0
        self._is_open, self._until_s = False, None
        factor = min(2.0**self._tries, _LONGEST_RETRY_S / _RETRY_S[1])
        self._tries = min(self._tries + 1, 10)
        self._retry_s = now + factor * self._chance.uniform(*_RETRY_S)

    def _look_whether_cut_off(self) -> None:
        unled_s = self._clock.now_s - self._unled_s
        if not self._is_cut_off and self._clock.now_s >= self._cut_off_s:
            self._is_cut_off = True
            if self._is_training:
                self._stopped_s = self._clock.now_s
                text = f"no coordinator reachable for {unled_s:.0f} s (network failure, or its host is lost)"
                self._out.append(m.Tell(f"{text}: terminating the ranks of this node; other nodes may continue"))
                self._ended(m.End(self.standing.cycle, Outcome.MEMBERSHIP, True, lost=True, text=text, is_cut_off=True))
                if self._is_open and self.standing.report is not None:  # its hello said that the ranks run
                    self._out.append(actions.Transmit(self.standing.report))
        timeout = f"{self.identity.rules.join_timeout_s:g} s (--rdzv-conf join_timeout)"
        problem = f"{self.identity.endpoint}: {self._problem}"
        if self.identity.is_here and not self.owns and not self._unled_s:  # no leader has ever admitted it
            if unled_s >= TAKEN_S:
                endpoint = self.identity.endpoint
                text = f"another program has the port of the rendezvous endpoint {endpoint} on this machine: end it"
                shows = f"`ss -ltnp sport = :{endpoint.rpartition(':')[2]}` shows it"
                self._leave(MISTAKE_CODE, f"{text} ({shows}), or choose another port")
        elif not self._has_said_unreached and self._is_new and unled_s >= _REPORT_UNREACHED_S:
            self._has_said_unreached = True
            self._out.append(m.Tell(f"no coordinator reached ({problem}); trying for {timeout}"))
        if self._clock.now_s >= self._gives_up_s and not self._is_training:
            self._give_up(problem, timeout)

    def _give_up(self, problem: str, timeout: str) -> None:
        """Leave: the time is over. An endpoint that nobody has ever held is a mistake, unless a scheduler named it."""
        verdict, self.has_given_up = self.standing.verdict, self._is_new
        if verdict is not None and verdict.decision.action is not Action.RESTART:
            self._leave(verdict.code, verdict.cause.text)
        elif self.standing.phase is m.NodePhase.EXCLUDED:
            # the other nodes may still train, and a scheduler may end their job at any other code
            self._leave(0, "no coordinator is reachable any more")
        elif self._is_new and self._is_unowned and not self.identity.has_known_host:
            text = f"no process was reached at {self.identity.endpoint} for {timeout} ({problem}), and this launcher is"
            text = f"{text} not its host: start a launcher there, or set --rdzv-conf is_host=1 on one node"
            self._leave(MISTAKE_CODE, text)
        else:
            text = f"no coordinator reachable that can continue the job ({problem}): start the job again"
            text = f"no coordinator reached for {timeout} ({problem})" if self._is_new else text
            self._leave(TRY_AGAIN_CODE, text)

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

    @property
    def _gives_up_s(self) -> float:
        """When to look for a leader no longer, unless ranks run.

        Where the scheduler starts no single launcher again, a leader that is lost with its host doesn't come back: the
        job is to be started again as soon as the ranks have ended. With etcd another launcher leads.
        """
        rules = self.identity.rules
        if rules.launchers > 0 and not self._is_new and not self.identity.is_in_etcd:
            return self._unled_s + CUT_OFF_S
        return max(self._unled_s, self._stopped_s) + rules.join_timeout_s

    def _unanswered(self) -> None:
        """No leader has answered the goodbye: whether the job goes on isn't known."""
        if self._leaving is not None and self._leaving.excluded:
            self._stay()
        else:
            self._leave(1 if self._leaving is None else self._leaving.code, "")

    def _stay(self) -> None:
        """This node is excluded, and never trains again. Its launcher connects again, to hear of the end."""
        self.decided = None
        self.standing = m.NodeStatus(phase=m.NodePhase.EXCLUDED, report=self.standing.report)
        self._leaving = self._leave_s = None
        self.is_led, self._is_cut_off, self._unled_s = False, False, self._clock.now_s
        self._out.append(m.Stay())
        self._reconnect()

    def _leave(self, code: int, text: str, *, is_of_all: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            self._out.append(m.Dismiss(code, text, is_of_all))

    # -- messages of the leader ---------------------------------------------------------------------------------

    def heard(self, message: m.ToMember, now_s: float) -> list[actions.MemberEffect]:
        self._clock.set(now_s)
        self._heard_s = self._clock.now_s
        match message:
            case m.Admitted(epoch) if epoch < self._epoch:
                self._reconnect("it leads no more")
            case m.Admitted(epoch):
                self._epoch = epoch
                self.is_led, self._is_cut_off, self._until_s, self._tries = True, False, None, 0
            case m.Beat(number) if number:
                self._out.append(actions.Transmit(message))
            case Assignment():
                self._decided(message)
            case m.Stay() if self._leaving is not None:
                self._stay()
            case m.Dismiss(m.REFUSED, text) if self.decided is not None:
                self._reconnect(text)  # another job has got the endpoint, after the leader was lost
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
                self._prints(message.printer)
                if message.cycle == self.standing.cycle:
                    self.standing = replace(self.standing, verdict=message)
                self._out.append(message)
            case PartMessage():
                self._note(message)
                self._out.append(message)
            case m.Tell(printer=printer):
                self._prints(printer)
                self._out.append(message)
            case NodeLost():
                self._out.append(message)

    def _prints(self, printer: str) -> None:
        """Note which launcher prints the lines about the job; empty: that is as it was."""
        if printer:
            self._out.append(actions.PrintsJobLines(printer == self.identity.instance))

    def _note(self, message: PartMessage) -> None:
        """Keep what the next leader is to be told."""
        self.standing = replace(self.standing, parts=message.noted(self.standing.parts, self.standing.cycle))

    def _decided(self, held: Assignment) -> None:
        decision, last = held.decision, self.decided
        if last is not None and last.decision.id == decision.id:
            return
        self.decided = held
        if decision.kind is DecisionKind.END:
            self._prints(decision.printer)
            end = at_end(self.identity, decision, self.standing)
            self._leave(end.code, end.text, is_of_all=end.is_of_all)
        elif self._leaving is None:  # else the decision crossed the goodbye
            if held.place is not None:
                self._opening, self.standing = None, m.NodeStatus(m.NodePhase.RUNNING, decision.cycle)
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
        """Report the state of this node or its ranks; `Dismiss` follows a `Goodbye` within its ``within_s``.

        A later leader is told the state of the node again, but not the events of its ranks.
        """
        self._clock.set(now_s)
        verdict = self.standing.verdict
        match message:
            case m.Report():
                self.standing = replace(self.standing, report=message)
            case m.Ready(parts) if verdict is None or verdict.decision.action is Action.RESTART:
                self._opening = parts
                self._out.append(actions.OpenStore())
                return self._take()
            case m.Ready(parts):  # no cycle follows
                self._ready(parts, "")
            case m.StatusChanged(parts) if self._opening is not None:
                self._opening = parts
                return self._take()
            case m.StatusChanged(parts) if self.standing.phase is m.NodePhase.READY:
                self._ready(parts, self.standing.store)
            case m.Shutdown(text):
                self.standing = replace(self.standing, shutdown=text)
            case m.NodeUnfit():
                self.standing = replace(self.standing, phase=m.NodePhase.ASIDE)
            case m.Goodbye():
                self._leaving, self._opening = message, None
                within_s = HOLDER_STAYS_S if self.owns and not message.excluded else message.within_s
                self._leave_s = self._clock.now_s + within_s
            case PartMessage():
                self._note(message)
        if self._is_open:  # else the next hello says it
            self._out.append(actions.Transmit(message))
        return self._take()

    def store_opened(self, address: str, now_s: float) -> list[actions.MemberEffect]:
        """The store that ``OpenStore`` asked for listens at ``address``."""
        self._clock.set(now_s)
        parts, self._opening = self._opening, None
        if parts is not None:
            self._ready(parts, address)
            self._out += [actions.Transmit(m.Ready(parts, address))] if self._is_open else []
        return self._take()

    def _ready(self, parts: Parts, store: str) -> None:
        parts = self.standing.parts.updated(*parts)
        self.standing = replace(self.standing, phase=m.NodePhase.READY, parts=parts, store=store)

    @property
    def _nodes(self) -> int:
        return 0 if self.decided is None else self.decided.decision.world

    @property
    def _lost_s(self) -> float:
        return lost_s(self._nodes)

    def _take(self) -> list[actions.MemberEffect]:
        taken = self._out[:]
        self._out.clear()
        return taken


def at_end(identity: m.Identity, decision: Decision, standing: m.NodeStatus) -> m.Dismiss:
    """Return how to leave when the end of the job was decided.

    A launcher that never trained mustn't say that its job has finished if that may have been another one.
    """
    has_part = standing.cycle >= 0 or standing.phase is m.NodePhase.EXCLUDED
    if decision.code == 0 and decision.world and not (has_part or identity.is_named):
        text = (
            f"{identity.job} has finished without this launcher, and may have been another job: nothing was trained "
            "here. Give each job its own --rdzv-id (and endpoint), and the launchers of one job, spares included, the "
            "same"
        )
        return m.Dismiss(MISTAKE_CODE, text)
    return m.Dismiss(decision.code, decision.text, is_of_all=True)
