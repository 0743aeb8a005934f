"""The leader of a simulated job, and its lock: the socket at the endpoint, or a key in a model of etcd."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ft.diagnosis.exceptions import is_peer_loss
from megatron_ft.diagnosis.hang_messages import RankSnapshots
from megatron_ft.job.etcd_leader import Decisions
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import Body, Call, EtcdAway, Ledger, Seen, release, take
from megatron_ft.job.rules.nodes import GRACE_S
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.link.base.codec import decode
from tests.simulation.world import ETCD, Host, Link, Process, World
from tests.support.etcd_model import EtcdModel

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher

JOB = "the job"
ENDPOINT = "h0"
FORMER = 7
"""Number of the last decision of an earlier run."""
_GIVES_UP_S = 2.0
"""A call that etcd doesn't answer fails after this time."""
_AGAIN_S = 0.3
_MOST_OVERDUE = 3
"""Conclusions of a leader, one after the other, that leave something to be done at once."""
_T = TypeVar("_T")


class Etcd:
    """etcd, as processes on the hosts reach it. ``decided``: gets each decision once it is durable."""

    def __init__(self, world: World, decided: Callable[[DecisionRecord], None]) -> None:
        self.model = EtcdModel()
        self._world = world
        self._decided = decided
        self._known = 0
        """Revision of the last decision."""

    def make_former(self) -> None:
        """Let an earlier run of the job have ended here."""
        held = take(self.model, JOB, "h0:0")
        assert held is not None
        ledger = Ledger(self.model, JOB, held.epoch, held.lease)
        decision = Decision(FORMER, "former.7", self._world.chance.choice(list(DecisionKind)), 6, 2, code=3)
        assert ledger.keep(DecisionRecord(decision, "", ("former0", "former1"), ("h0", "h1")))
        release(self.model, held.lease)
        self._known = self.model.revision

    def call_from(self, host: Host) -> Call:
        """Return what processes on that host call."""

        def call(path: str, body: Body) -> Body:
            if self._is_cut(host):
                raise EtcdAway("timed out")
            self.model.now_s = self._world.now_s
            try:
                return self.model(path, body)
            finally:
                for name, key in self.model.keys.items():
                    if name.endswith("/decision") and key.mod > self._known:
                        self._known = key.mod
                        self._decided(decode(DecisionRecord, base64.b64decode(key.value)))

        return call

    def ask(self, process: Process, work: Callable[[], _T], then: Callable[[Callable[[], _T]], None]) -> None:
        """Do work in a thread of a process, and give it the result, as a function that returns it, or raises."""

        def works() -> None:
            try:
                result = work()
            except EtcdAway as error:
                process.later(_GIVES_UP_S * self._is_cut(process.host) + 0.001, partial(then, partial(_raise, error)))
            else:
                process.later(self._world.delay_s(), partial(then, lambda: result))

        process.later(self._world.delay_s(), works)

    def _is_cut(self, host: Host) -> bool:
        return bool(self._world.cuts & {(host.number, ETCD), (ETCD, host.number)}) or not host.is_on


def _raise(error: Exception) -> Any:
    raise error


class Lock(Process):
    """The lock, and the socket of the leader: a connection is kept until a leader takes it.

    ``held``: the lease in etcd; None: the lock is the socket.
    """

    def __init__(self, owner: Launcher, address: str, held: Seen | None = None) -> None:
        super().__init__(owner.host, f"lock of {owner.name}")
        self.job = owner.job
        self.owner = owner
        self.address, self.held = address, held
        self.record: DecisionRecord | None = None
        """That of the last decision, in the launcher's memory."""
        self.coordinator: CoordinatorProcess | None = None
        self.has_told = False
        """A leader has told everybody of the job's end, or has lost the lock in etcd."""
        self.job.locks[address] = self
        self._begin_leader()

    @property
    def _is_over(self) -> bool:
        return self.record is not None and self.record.decision.kind is DecisionKind.END

    @property
    def is_needed(self) -> bool:
        """The job has ended, and the leader is still telling the launchers."""
        return self._is_over and not self.has_told

    @property
    def is_frozen(self) -> bool:
        """Messages wait for a leader."""
        return self.coordinator is None or super().is_frozen

    def hand_over(self) -> None:
        """Give the leader all connections that were made, and what has come on them."""
        if self.coordinator is not None:
            for link in list(self.links):
                self.coordinator.take(link, self)
            self.thaw()

    def _begin_leader(self) -> None:
        self.owner.later(self.world.chance.uniform(0.05, 0.15), self._start)

    def _start(self) -> None:
        """Begin a leader, with what earlier ones have decided, once etcd answers."""
        if not self.is_alive or self.coordinator is not None:
            return
        if self.held is None:
            self._lead(None, self.record)
            return
        ledger = Ledger(self.job.etcd.call_from(self.host), JOB, self.held.epoch, self.held.lease)

        def entered(result: Callable[[], DecisionRecord | None]) -> None:
            if not self.is_alive:
                return
            try:
                self._lead(ledger, result())
            except EtcdAway:
                self.owner.later(_AGAIN_S, self._start)

        self.job.etcd.ask(self.owner, ledger.enter, entered)

    def _lead(self, ledger: Ledger | None, record: DecisionRecord | None) -> None:
        self.coordinator = CoordinatorProcess(self.job, self, ledger, record)
        self.hand_over()

    def leader_died(self, *, has_quit: bool) -> None:
        """Replace the leader, unless it has done its work, or has lost its lease."""
        self.coordinator, self.has_told = None, self.has_told or has_quit
        if not has_quit:
            self._begin_leader()

    def give_up(self, *, is_released: bool = True) -> None:
        """End the leader: its launcher ends, or another one has the lease."""
        if self.held is None and (self.coordinator is not None or not self._is_over):
            self.job.lock_lost_s.append(self.world.now_s)
        elif self.held is not None and is_released:
            with contextlib.suppress(EtcdAway):  # it expires
                release(self.job.etcd.call_from(self.host), self.held.lease)
        if self.coordinator is not None:
            self.coordinator.has_quit = True
            self.coordinator.die(silently=not self.host.is_on)
        self.die(silently=not self.host.is_on)

    def died(self) -> None:
        self.owner.lock = None
        if self.job.locks.get(self.address) is self:
            del self.job.locks[self.address]


@dataclass(frozen=True)
class Judged:
    """A verdict, as its coordinator reached it."""

    at_s: float
    verdict: m.Verdict
    by: CoordinatorProcess


class CoordinatorProcess(Process):
    """`python -m megatron_ft.coordinator`."""

    def __init__(self, job: Job, lock: Lock, ledger: Ledger | None, record: DecisionRecord | None) -> None:
        super().__init__(lock.host, f"coordinator{len(job.coordinators)}@h{lock.host.number}")
        self.job = job
        self.lock = lock
        self.machine = Coordinator(
            self.name,
            m.JobDefinition(JOB, job.plan.rules),
            record=record,
            epoch=0 if lock.held is None else lock.held.epoch,
            now_s=self.host.clock_s(),
            parts=LEADER_PARTS,
        )
        self.numbers: dict[int, Link] = {}
        self._decisions = Decisions(ledger, self.machine.rules, self.numbers)
        self.has_quit = False
        self.started_s = self.world.now_s
        self.ended_s: float | None = None
        self.known: dict[str, float] = {}
        """Launchers (instances) whose own failure or end it has heard of, and since when it has to act by that."""
        self.resets: list[float] = []
        """When connections to it were reset: their launchers may have ended, or not."""
        self._instances: dict[int, str] = {}
        """By number of the connection."""
        self.dies_deciding: int | None = None
        """Number of effects after its next decision at which it dies."""
        job.coordinators.append(self)
        self.world.tell(f"{self.name} starts")
        self._settles_soon = self._is_asked_to_end = False
        self._overdue = 0
        self.settle()

    # -- connections ------------------------------------------------------------------------------------------

    def take(self, link: Link, lock: Lock) -> None:
        """Take a connection that was made to the socket."""
        link.ends[link.ends.index(lock)] = self
        lock.links.remove(link)
        self.links.append(link)
        self.numbers[link.number] = link

    def received(self, link: Link, message: Any) -> None:
        if isinstance(message, m.Hello):
            self._instances[link.number] = message.instance
            self.known.pop(message.instance, None)
        if link.number in self.numbers and _tells_of_own_failure(message):
            self._knows(link, 0.0)
        self._is_asked_to_end |= isinstance(message, m.Shutdown) and link.number in self.numbers
        self._settle_after(self.machine.heard(link.number, message, self.host.clock_s()))

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        self.numbers.pop(link.number, None)
        self.world.tell(f"  {self.name}: {link.number} has ended{' silently' * silent}{', was reset' * reset}")
        if reset:
            self.resets.append(self.world.now_s)
        elif not silent:
            self._knows(link, GRACE_S)
        now_s = self.host.clock_s()
        self._settle_after(self.machine.broken(link.number, now_s, silent=silent, reset=reset))

    def _knows(self, link: Link, grace_s: float) -> None:
        self.known.setdefault(self._instances.get(link.number, ""), self.world.now_s + grace_s)

    def _settle_after(self, asked: list[actions.CoordinatorEffect]) -> None:
        self._do(asked)
        if self.machine.needs_settling and not self._settles_soon and self.is_alive:
            self._settles_soon = True
            self.later(0.0002, self.settle)

    def settle(self) -> None:
        self._settles_soon = False
        now_s = self.host.clock_s()
        self._do(self.machine.settle(now_s))
        self._overdue = self._overdue + 1 if self.machine.alarm_s <= now_s else 0
        assert self._overdue <= _MOST_OVERDUE, "the leader turns without a pause"
        self._wake()

    def _wake(self) -> None:
        if self.is_alive:
            self.wake_at(min(self.machine.alarm_s, self._decisions.due_s), self._alarm)

    def _alarm(self) -> None:
        if self.host.clock_s() >= self._decisions.due_s:
            self.job.etcd.ask(self, self._decisions.request(), self._answered)
        if self.host.clock_s() >= self.machine.alarm_s:
            self.settle()
        else:
            self._wake()

    def _answered(self, answer: Callable[[], bool]) -> None:
        made = self._decisions.answered(answer, self.host.clock_s())
        self.machine.lock_answers = not self._decisions.problem
        self._carry_all_out(made)
        self._wake()

    # -- effects ----------------------------------------------------------------------------------------------

    def _do(self, asked: list[actions.CoordinatorEffect]) -> None:
        self._carry_all_out(self._decisions.admit(asked, self.host.clock_s()))

    def _carry_all_out(self, effects: list[actions.CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, actions.Send):
                self._send(effect)
            elif self.counts_effect():
                self._carry_out(effect)
            if not self.is_alive:
                return

    def _send(self, effect: actions.Send) -> None:
        verdict = effect.message
        if isinstance(verdict, m.Verdict) and verdict not in [judged.verdict for judged in self.job.verdicts]:
            self.world.tell(f"{self.name} judges {verdict}")
            self.job.verdicts.append(Judged(self.world.now_s, verdict, self))
        for number in effect.links:
            if not self.counts_effect():
                return
            if number not in self.numbers:
                continue
            if self.world.story is not None and not isinstance(effect.message, m.Beat):
                self.world.tell(f"  {self.name} -> {number}: {str(effect.message)[:150]}")
            self.numbers[number].send(self, effect.message)

    def _carry_out(self, effect: actions.CoordinatorEffect) -> None:
        match effect:
            case actions.Drop(number):
                if (link := self.numbers.pop(number, None)) is not None:
                    link.close(self)
            case DecisionRecord(decision):
                self.lock.record = effect
                self.world.tell(f"{self.name} decides {decision} {effect.instances}")
                if self._is_asked_to_end and decision.kind is DecisionKind.START:
                    self.job.heedless.append(f"{self.name} decides cycle {decision.cycle}")
                if self.lock.held is None:
                    self.job.decided(effect)
                self.dies_at_effect = self.dies_at_effect if self.dies_deciding is None else self.dies_deciding
            case actions.Quit():
                self.has_quit = True
                self.die()

    def died(self) -> None:
        self.ended_s = self.world.now_s
        self.world.tell(f"{self.name} is gone")
        if self.lock.is_alive and self.lock.coordinator is self:
            self.lock.owner.call(partial(self.lock.leader_died, has_quit=self.has_quit))


def _tells_of_own_failure(message: Any) -> bool:
    """Return True if a launcher says that its node has failed, and not only because of another one."""
    match message:
        case m.Report(state=state, cause=cause):
            return state is not NodeState.SUCCEEDED and not cause.follows
        case RankSnapshots(notes=notes):
            return any(note.is_stopped or (note.gone and not is_peer_loss(note.raised)) for note in notes)
    return isinstance(message, m.Goodbye)
