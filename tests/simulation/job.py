"""A job in the simulated world: launchers with toy ranks, and coordinators, each around the real machines."""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.agent import effects, events
from megatron_ft.core.agent.agent import Agent
from megatron_ft.core.agent.turn import AgentPhase, Options
from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.control import WorkloadAction, WorkloadControl
from megatron_ft.core.facts.launcher import Abandoned, NodeHealth, RankExited, RankStarted
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.mailbox import Mailbox
from megatron_ft.core.messages.monitor_messages import Collect, ConfirmHang, ExtendTimeout, Release
from megatron_ft.core.pauses import Pauses
from megatron_ft.core.rerun import RerunState
from megatron_ft.diagnosis.exceptions import CrashOutput, is_peer_loss
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, RankSnapshots, Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.give_up_policy import HOLDER_STAYS_S
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.nodes import GRACE_S
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.learning.launcher_part import StateFile, StateFileDone
from megatron_ft.learning.messages import Arm, Intervals, Killed
from megatron_ft.learning.state import parse
from megatron_ft.memory.rules.snapshots import Complete, CopyTo, Kept, OfSnapshots, Passed, Restore
from tests.simulation.learning import STATE_PATH, Learning, ToyRank
from tests.simulation.plan import Fault
from tests.simulation.snapshots import PER_S, Keeper, Snapshots
from tests.simulation.world import Host, Link, Process, World
from tests.support.agents import HANG as SECTION_HANG
from tests.support.agents import attached, found_hung, observed, suspected

__all__ = ["FOR_GOOD_S", "LOST_A_PEER", "CoordinatorProcess", "Hurt", "Job", "Judged", "Launcher", "Made", "Trained"]

FOR_GOOD_S = 1e9
JOB = "the job"
_TAKE_AGAIN_S = 0.5
_LOOKS_S = 0.05
_STEP_S = 0.5
ENDPOINT = "h0"
_ANSWER_S = EVIDENCE_S + 1.0
"""A monitor that gets no answer for so long takes the rank for hung."""
_WAITS_S = 0.5
"""A rank looks so often whether the one that it waits for is there again, or was ended."""
_LATER_S = (5.0, 10.0)
"""Seconds after which the last ranks exceed their timeouts, too, if one hangs."""
_SAME_ITERATION = 7
"""Where each cycle gets in a job that makes no progress."""

LOST_A_PEER = "RuntimeError: gloo: connection closed by peer"
WAITED_IN_VAIN = "RuntimeError: gloo: Timed out waiting 2000ms for recv operation to complete"
BOARD = BoardSnapshot(
    **dict.fromkeys(set(BoardSnapshot._fields) - BoardSnapshot._field_defaults.keys(), 0)  # type: ignore[arg-type]
)._replace(sections=(), closing=False)
HANG = replace(SECTION_HANG, iteration=1, at_ns=0)


@dataclass(frozen=True)
class Told:
    """A message that the agent has for the coordinator, or for its keeper."""

    message: m.NodeMessage | OfSnapshots


@dataclass
class Trained:
    """One node's ranks in one cycle, from when to when in true time."""

    cycle: int
    launcher: Launcher
    from_s: float
    to_s: float | None = None
    held: Assignment | None = None
    """The decision by which they were started."""


@dataclass(frozen=True)
class Hurt:
    """What a fault did to a launcher, its ranks, its host or its network, and from when to when."""

    fault: Fault
    from_s: float
    until_s: float
    cycle: int | None = None
    """The cycle whose ranks it hit; None if it hit something else."""


@dataclass(frozen=True)
class Judged:
    """A verdict, as its coordinator reached it."""

    at_s: float
    verdict: m.Verdict
    by: CoordinatorProcess


@dataclass(frozen=True)
class Made:
    """A decision, as its coordinator made it."""

    at_s: float
    decision: Decision
    members: tuple[str, ...]
    by: str


@dataclass
class Job:
    """What is common to all launchers, and what happened."""

    world: World
    rules: m.Rules
    work_s: float
    learns: bool = False
    makes_progress: bool = True
    tells_progress: bool = False
    shares_network: bool = False
    steps: Counter[int] = field(default_factory=Counter)
    """Number of steps that the ranks of each cycle have made together."""
    launchers: list[Launcher] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    verdicts: list[Judged] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    coordinators: list[CoordinatorProcess] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    lock_lost_s: list[float] = field(default_factory=list)
    """When a launcher died that held the lock, and the job wasn't over."""
    lock: Listener | None = None
    """The socket at the endpoint, on the first host, if a launcher holds it."""
    stores: dict[str, str] = field(default_factory=dict)
    """Stores that were opened, and the launcher (instance) that has opened each."""
    done_s: float = 0.0
    wronged: list[str] = field(default_factory=list)
    """Ranks that only waited for another one, and were to be ended as hung."""
    heedless: list[str] = field(default_factory=list)
    """Cycles that were proposed by a coordinator which had been asked for the end of the job."""
    broken_cycles: set[int] = field(default_factory=set)
    """Those whose ranks have lost one of them."""
    learning: Learning = field(default_factory=Learning)
    snapshots: Snapshots = field(default_factory=lambda: Snapshots(0))
    snapshots_s: float = 0.0
    """Seconds from one memory checkpoint to the next; 0: there are none."""

    def launch(self, host: Host, *, rank: int | None = None) -> Launcher:
        """Start a launcher."""
        launcher = Launcher(self, host, rank)
        self.launchers.append(launcher)
        return launcher

    def step(self) -> None:
        """Let the ranks of each cycle make a step, if all of them can."""
        running: dict[int, list[Launcher]] = {}
        for each in self.launchers:
            if each.ranks is not None and each.runs():
                running.setdefault(each.ranks.cycle, []).append(each)
        for cycle, launchers in running.items():
            held, hosts = launchers[0].member.decided, [each.host for each in launchers]
            are_all = held is not None and len(launchers) == held.decision.world
            if are_all and not any(each.waits_or_hangs or each.host.is_frozen for each in launchers):
                pairs = itertools.combinations(hosts, 2) if self.shares_network else ()
                self.steps[cycle] += not any(self.world.is_cut(a, b) or self.world.is_cut(b, a) for a, b in pairs)
        if not self.launchers or not self.is_over():
            self.world.after(_STEP_S, self.step)

    def by_instance(self, instance: str) -> Launcher | None:
        """That launcher."""
        return next((each for each in self.launchers if each.instance == instance), None)

    def is_over(self) -> bool:
        """Whether every launcher has ended."""
        return all(not launcher.is_alive for launcher in self.launchers)


class Launcher(Process):
    """One `ft_launcher`: its two machines, and a toy of everything that they leave to others."""

    def __init__(self, job: Job, host: Host, rank: int | None) -> None:
        number = len(job.launchers)
        super().__init__(host, f"launcher{number}@h{host.number}")
        self.job = job
        self.number = number
        self.instance = f"i{number}"
        self.code: int | None = None
        self.left_by = ""
        self.how: effects.Exit | None = None
        self.stays_since_s: float | None = None
        """Its node is left out, and the others go on."""
        self.started_s = job.world.now_s
        self.ended_s: float | None = None
        self._hurts: list[Hurt] = []
        self.ranks: Trained | None = None
        self.is_ill = False
        self.ends_well = True
        """Its ranks end with 0 when they are asked to."""
        self.link: Link | None = None
        self._effects: Mailbox[actions.MemberEffect | effects.Effect | Told] = Mailbox(self._do, self.counts_effect)
        self._begun: Assignment | None = None
        self._error = ""
        self._is_hung = self.waits = self._is_found = False
        """Its rank hangs; its rank waits for one that does; its monitor has found it hung, and will end it."""
        self.stall: Fault | None = None
        """Why its rank waits."""
        self._asked = 0
        """Number of the monitor's last question to the launcher; 1 more if that was answered."""
        self._rerun: RerunState | None = None
        self._restore: Restore | None = None
        """What its rank's monitor would know, if it learns."""
        self.armed: dict[int, Arm] = {}
        """The last order of each cycle to its rank's monitor."""
        identity = m.Identity(
            job=JOB,
            rules=job.rules,
            instance=self.instance,
            name=f"h{host.number}",
            host=f"h{host.number}",
            endpoint=ENDPOINT,
            rank=rank,
            started_s=host.clock_s(),
        )
        self.keeper = Keeper(self, job.snapshots_s) if job.snapshots_s else None
        chance = random.Random(job.world.chance.random())
        self.member = Member(identity, now_s=host.clock_s(), chance=chance)
        found = Kept(local_ranks=1 if job.snapshots.copies and job.snapshots_s else 0)
        self.agent = Agent(_options(job.rules), Pauses(), found=found)
        self._agent_ns = self.agent.alarm_ns
        """When the agent is to be told the time; only an event changes that."""
        self._take_endpoint()
        self.later(0.0, self.tick)
        self.later(0.0, lambda: self.hear(events.Tick()))

    def _take_endpoint(self) -> None:
        """Hold the lock, if this is the endpoint's host, as soon as no other launcher does."""
        if self.host.number:
            return
        if self.job.lock is None:
            self.job.lock = Listener(self)
            self.member.owns = True
        else:
            self.later(_TAKE_AGAIN_S, self._take_endpoint)

    def hurt(self, fault: Fault, seconds: float = 0.0, *, cycle: int | None = None) -> None:
        """A fault hits it now, for so long."""
        now_s = self.world.now_s
        self._hurts.append(Hurt(fault, now_s, now_s + seconds, cycle))

    @property
    def hurts(self) -> list[Hurt]:
        """What faults did to it, or to its host while it was there."""
        ended_s = self.world.now_s if self.ended_s is None else self.ended_s
        of_host = [each for each in self.host.hurts if each.until_s >= self.started_s and each.from_s <= ended_s]
        return [*self._hurts, *of_host]

    @property
    def touched(self) -> list[float]:
        """From when and until when faults hit it, or its host, or its network."""
        return [at_s for hurt in self.hurts for at_s in (hurt.from_s, hurt.until_s)]

    # -- the machines -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        cycle = None if self.ranks is None or not self.runs() else self.ranks.cycle
        steps = self.job.steps[cycle] if self.job.tells_progress and cycle is not None else None
        self.do(self.member.tick(self.host.clock_s(), steps))

    def do(self, asked: Iterable[actions.MemberEffect | effects.Effect | Told]) -> None:
        """Bring about what the machines ask for, one after the other; this process may die in between."""
        if self._effects.post(asked) and self.is_alive and self.code is None:
            self.wake_at(self._due_s(), self._alarm)

    def hear(self, event: events.Event) -> None:
        """Tell the agent's machine."""
        if self.is_alive and self.code is None:
            asked = self.agent.handle(event, round(self.clock() * 1e9), self._seen())
            self._agent_ns = self.agent.alarm_ns
            self.do([Told(each) if isinstance(each, m.NodeMessage | OfSnapshots) else each for each in asked])

    def _due_s(self) -> float:
        alarm_ns = self._agent_ns
        return self.member.alarm_s if alarm_ns is None else min(self.member.alarm_s, alarm_ns / 1e9)

    def _alarm(self) -> None:
        is_early = True
        if self.clock() >= self.member.alarm_s:
            is_early = False
            self.tick()
        if self._agent_ns is not None and self.clock() * 1e9 >= self._agent_ns:
            is_early = False
            self.hear(events.Tick())
        if is_early and self.is_alive:
            self.wake_at(self._due_s(), self._alarm)

    def _do(self, effect: actions.MemberEffect | effects.Effect | Told) -> None:
        match effect:
            case actions.Begin(held):
                self._begun = held
                self.hear(effect)
            case m.End() | m.Verdict() | DiagnoseHang() | actions.Leave():
                self.hear(effect)
            case Reviewed() | Intervals() | Killed() | Complete() | Passed() | CopyTo():
                self.hear(effect)
            case actions.StandBy() | actions.PrintsJobLines():
                self.hear(effect)
            case actions.LeftOut():
                self.stays_since_s = self.world.now_s
                self.hear(effect)
            case Told(message):
                self._tell(message)
            case actions.Say(text):
                self.world.tell(f"{self.name} says: {text}")
                self.job.said.append(text)
            case effects.LauncherExit(how, code, text):
                self.world.tell(f"{self.name} leaves with {code}: {text}")
                self.code, self.left_by, self.how = code, text, how
                self._exits_when_all_know()
            case _ if not self._to_leader(effect):
                self._do_to_ranks(effect)

    def _to_leader(self, effect: actions.MemberEffect | effects.Effect) -> bool:
        """Return True if the effect is about the connection to the leader, or the store."""
        match effect:
            case actions.Connect():
                self._connect()
            case actions.Disconnect():
                self._disconnect()
            case actions.Transmit(message) if self.link is not None:
                if self.world.story is not None and not isinstance(message, m.Beat):
                    self.world.tell(f"  {self.name} ({self.link.number}) -> {str(message)[:150]}")
                self.job.learning.sent(message)
                self.link.send(self, message)
            case actions.OpenStore():
                store = f"{self.name}:{len(self.job.stores)}"
                self.job.stores[store] = self.instance
                self.later(0.002, lambda: self.do(self.member.store_opened(store, self.clock())))
            case actions.Transmit():
                pass
            case _:
                return False
        return True

    def _exits_when_all_know(self) -> None:
        """The launcher that holds the lock stays until its leader has told all others of the job's end."""
        lock, until_s = self.job.lock, self.world.now_s + HOLDER_STAYS_S + 1.0
        self._disconnect(resets=False)
        self._ranks_ended(is_failure=False)

        def look() -> None:
            is_told = lock is None or lock.owner is not self or lock.record is None
            is_told = is_told or lock.record.decision.kind is not DecisionKind.END or lock.has_told
            if is_told or self.world.now_s >= until_s:
                self.die()
            else:
                self.later(_LOOKS_S, look)

        look()

    def clock(self) -> float:
        """This host's."""
        return self.host.clock_s()

    def _connect(self) -> None:
        self._disconnect()
        listener, host = self.job.lock, self.world.hosts[0]
        if self.world.is_cut(self.host, host) or self.world.now_s < host.frozen_until_s:
            return  # nobody answers, and the machine gives up by itself
        if listener is None:
            self.later(0.001, lambda: self.do(self.member.failed(self.clock())) if self.link is None else None)
            return
        link = self.link = Link(self.world, self, listener)
        within_s = self.world.handshake_s(self.host, listener.host)
        self.world.after(within_s, lambda: listener.call(lambda: listener.accepts(link)))
        self.later(within_s, lambda: self.do(self.member.opened(self.clock())) if self.link is link else None)

    def _disconnect(self, *, resets: bool = True) -> None:
        if self.link is not None:
            link, self.link = self.link, None
            link.close(self, resets=resets)

    def received(self, link: Link, message: Any) -> None:
        """From the coordinator."""
        if link is self.link:
            self.do(self.member.heard(message, self.clock()))

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        """The coordinator has ended, or so it seems."""
        if link is self.link:
            self.link = None
            self.do(self.member.broken(self.clock()))

    def died(self) -> None:
        """Its ranks die with it. With their host's power nothing ends their connections to the others."""
        self.ended_s = self.world.now_s
        self.world.tell(f"{self.name} is gone")
        self._ranks_ended(is_failure=self.host.is_on)
        if self.job.lock is not None and self.job.lock.owner is self:
            self.job.lock.owner_died()

    # -- its ranks: one on each node, a toy --------------------------------------------------------------------

    def _tell(self, message: m.NodeMessage | OfSnapshots) -> None:
        match message:
            case Complete(key):
                if self.keeper is not None:
                    self.keeper.is_complete(key)
            case Passed(key):
                if self.keeper is not None:
                    self.keeper.release(key)
            case CopyTo(address=address):
                if self.keeper is not None:
                    self.keeper.copies_to(address)
            case _:
                self.do(self.member.tell(message, self.clock()))

    def _seen(self) -> events.Readings:
        iteration = int(PER_S * self.world.now_s) if self.job.makes_progress else _SAME_ITERATION
        poisoned = self.job.snapshots.poisoned
        if poisoned is not None and self._restore is not None and self._restore.key == poisoned:
            iteration = min(iteration, poisoned.iteration)
        board = BOARD._replace(first_iteration=0, iteration=iteration)
        return events.Readings(
            {0: board}, {0: CrashOutput(self._error, rerun=self._rerun)}, {0: self._is_hung}, {0: {}}
        )

    def _do_to_ranks(self, effect: actions.MemberEffect | effects.Effect) -> None:
        chance = self.world.chance
        match effect:
            case effects.CheckHealth():
                self.later(chance.uniform(0.0, 0.5 if self.ranks is None else 0.01), self._check_health)
            case effects.StartRanks(restore=restore):
                self._restore = restore
                self.later(chance.uniform(0.0, 0.01), self._start_ranks)
            case effects.SignalRanks(_, number):
                code = 0 if self.ends_well and not self._is_hung else -number
                self.later_in_cycle(chance.uniform(0.1, 1.0), lambda: self._exits(code, by_us=True))
            case Release() if self._is_found:
                self.later_in_cycle(0.1, lambda: self._exits(-9, by_us=True))
            case effects.TerminateRanks():
                self.later(chance.uniform(0.05, 0.4), self._terminate)
            case effects.OrderMonitor(_, Collect()):
                self.later_in_cycle(chance.uniform(0.05, 1.5), self._notice)
            case StateFile(document=None):
                document = self.job.learning.document
                state = None if document is None else parse(document)
                self.later(chance.uniform(0.001, 0.2), lambda: self.hear(StateFileDone(effect, state)))
            case StateFile(_, document):
                self.later(chance.uniform(0.001, 0.2), lambda: self._write_state(effect))
            case _:
                self._do_to_monitor(effect)

    def _do_to_monitor(self, effect: actions.MemberEffect | effects.Effect) -> None:
        match effect:
            case effects.OrderMonitor(_, Arm() as arm):
                self.armed[arm.cycle] = arm
            case effects.OrderMonitor(_, ConfirmHang()) if self.runs():
                self._confirmed()
            case effects.OrderMonitor(_, ExtendTimeout(_, timeout_s)) if self.waits or self._is_hung:
                self._asked += 1
                self.later_in_cycle(timeout_s / 2, self.suspects)

    def _write_state(self, file: StateFile) -> None:
        self.job.learning.document = file.document
        self.hear(StateFileDone(file))

    def _reach_milestones(self, trained: Trained, left_s: float) -> None:
        """The rank takes steps, saves at random moments, and ends."""
        toy = ToyRank(trained.cycle, self.member.place or 0, self.world.now_s, self.world.chance)

        def reach(milestone: Any) -> None:
            toy.reaches(**milestone)
            if self.ranks is not None and trained.cycle == self.ranks.cycle:
                self.hear(events.MonitorReport(0, toy.intervals(self.world.now_s)))

        for delay_s, milestone in toy.milestones(left_s):
            self.later_in_cycle(delay_s, lambda milestone=milestone: reach(milestone))

    def _check_health(self) -> None:
        if self.agent.phase is AgentPhase.CHECKING:
            ended = "exited with code 1" if self.is_ill else ""
            self.hear(
                NodeHealth(
                    cycle=0, good=not ended, text=ended, exit_code=1 if self.is_ill else 0, last_line="", seconds=0.1
                )
            )

    def _start_ranks(self) -> None:
        if not self.agent.wants_ranks:
            self.hear(events.NotStarted())
            return
        held = self.member.decided
        cycle, place = self.agent.cycle.record.cycle, self.member.place or 0
        self.world.tell(f"{self.name} starts ranks of cycle {cycle} at place {place}")
        self._error, self._rerun = "", None
        self._is_hung = self.waits = self._is_found = False
        trained = self.ranks = Trained(cycle, self, self.world.now_s, held=self._begun)
        self.job.trained.append(trained)
        world = 1 if held is None else held.decision.world
        self.hear(events.RanksMet([place], place, world, world))
        now_ns = round(self.clock() * 1e9)
        path = STATE_PATH if self.job.learns else ""
        watched = attached(0, cycle, now_ns, state_path=path, learns=self.job.learns)
        for event in (RankStarted(rank=0, local_rank=0, pid=1, at_ns=now_ns), events.RanksStarted(), watched):
            self.hear(event)
        left_s = max(0.5, self.job.work_s - self.job.done_s)
        if self.job.learns:
            self._reach_milestones(trained, left_s)
        if self.keeper is not None:
            self.keeper.prepare(trained, place, world, self._restore)
        self.later_in_cycle(left_s + self.world.chance.uniform(0.0, 0.3), self._finishes)

    def _finishes(self) -> None:
        """Its work is done, unless it hangs, or as soon as it waits no more for a rank that hangs."""
        if self.waits:
            self.later_in_cycle(_WAITS_S, self._finishes)
        elif not self._is_hung:
            self._exits(0)

    def later_in_cycle(self, delay_s: float, action: Callable[[], None]) -> None:
        """Unless the rank has ended by then."""
        trained = self.ranks
        self.later(delay_s, lambda: action() if self.ranks is trained and self.runs() else None)

    @property
    def is_last(self) -> bool:
        """Its rank runs, and some other of the cycle has ended with 0."""
        if self.ranks is None or not self.runs():
            return False
        same = [each for each in self.job.trained if each.cycle == self.ranks.cycle]
        return any(each.to_s is not None for each in same)

    @property
    def waits_or_hangs(self) -> bool:
        return self.waits or self._is_hung

    def runs(self) -> bool:
        return self.ranks is not None and self.ranks.to_s is None

    def _exits(self, code: int, *, by_us: bool = False) -> None:
        self._ranks_ended(is_failure=code != 0 and not by_us)
        self._hear_exit(code, by_us=by_us)

    def _hear_exit(self, code: int, *, by_us: bool = False) -> None:
        cycle, sent = self.agent.cycle.record, (9, 15) if by_us else ()
        at_ns = round(self.clock() * 1e9)
        self.hear(RankExited(rank=cycle.ranks[0], cycle=cycle.cycle, exitcode=code, at_ns=at_ns, signals_sent=sent))

    def _terminate(self) -> None:
        if self.runs():
            self._exits(-15, by_us=True)
        self.hear(events.RanksEnded() if self.keeper is None else events.RanksEnded(kept=self.keeper.kept()))

    def _ranks_ended(self, *, is_failure: bool) -> None:
        trained = self.ranks
        if trained is not None and trained.to_s is None:
            trained.to_s = self.world.now_s
            if self._is_hung:
                for other in self._others_in(trained):
                    other.waits = False
            self.job.done_s = max(self.job.done_s, self.job.done_s + 0.2 * (trained.to_s - trained.from_s) - 0.5)
            if is_failure:
                self._others_notice(trained)

    def _others_notice(self, trained: Trained) -> None:
        cycles = self.job.broken_cycles
        if trained.cycle in cycles or self.job.rules.min_healthy:
            return
        cycles.add(trained.cycle)
        for other in self._others_in(trained):
            if self.world.chance.random() < 0.5:
                other.later_in_cycle(self.world.chance.uniform(0.01, 1.0), other.loses_a_peer)

    def _others_in(self, trained: Trained) -> list[Launcher]:
        """Other launchers whose ranks run in that cycle."""
        others = [each for each in self.job.launchers if each is not self and each.runs()]
        return [each for each in others if each.ranks is not None and each.ranks.cycle == trained.cycle]

    def loses_a_peer(self, error: str = LOST_A_PEER) -> None:
        if not self._is_hung:
            self._error = error
            self._exits(1)

    def rank_fails(self, fault: Fault) -> None:
        """By itself."""
        if self.ranks is not None and self.runs():
            self.hurt(fault, cycle=self.ranks.cycle)
            self._exits(-9)

    def reruns(self, fault: Fault, code: int, state: RerunState) -> None:
        """Megatron's rerun state machine ends the rank in a moment, as it ends all of the job."""
        self.later_in_cycle(self.world.chance.uniform(0.0, 0.2), lambda: self._ends_by_rerun(fault, code, state))

    def _ends_by_rerun(self, fault: Fault, code: int, state: RerunState) -> None:
        assert self.ranks is not None
        self.hurt(fault, cycle=self.ranks.cycle)
        self._rerun = state
        self._ranks_ended(is_failure=False)
        self._hear_exit(code)

    def rank_hangs(self, fault: Fault) -> None:
        """A monitor finds it hung."""
        if self.ranks is not None and self.runs() and not self.job.rules.min_healthy:
            self.hurt(fault, cycle=self.ranks.cycle)
            self._is_hung = self._is_found = True
            at_ns = round(self.clock() * 1e9)
            verdict = replace(HANG, rank=self.member.place or 0, at_ns=at_ns, learned=self.job.learns)
            self.hear(found_hung(0, self.ranks.cycle, verdict))
            self.later_in_cycle(self.world.chance.uniform(0.05, 1.5), self._notice)

    def rank_blocks(self, fault: Fault) -> None:
        """It hangs, no monitor finds that, and the collectives of ranks that wait for it time out."""
        if self.ranks is None or not self.runs() or self.job.rules.min_healthy:
            return
        if others := self._others_in(self.ranks):
            self.hurt(fault, cycle=self.ranks.cycle)
            self._is_hung = True
            late = [each for each in others if self.world.chance.random() < 0.5] or others[:1]
            for each in late:
                each.later_in_cycle(self.world.chance.uniform(0.0, 0.5), partial(each.loses_a_peer, WAITED_IN_VAIN))

    def rank_stalls(self, fault: Fault) -> None:
        """A rank hangs in a job whose nodes go on without it: the ranks that wait for it exceed their timeouts, too."""
        if self.ranks is None or not self.runs() or not self.job.rules.min_healthy:
            return
        self.hurt(fault, cycle=self.ranks.cycle)
        self._is_hung = True
        others = self._others_in(self.ranks)
        for other in others:
            other.waits, other.stall = True, fault
        first = [each for each in (self, *others) if self.world.chance.random() < 0.5] or [self]
        for each in (self, *others):
            within_s = (0.0, 1.0) if each in first else _LATER_S
            each.later_in_cycle(self.world.chance.uniform(*within_s), each.suspects)

    def suspects(self) -> None:
        """Its monitor asks whether the rank hangs, or only waits."""
        if self.ranks is not None and (self._is_hung or self.waits):
            asked, self._asked = self._asked + 1, self._asked + 1
            self.later_in_cycle(_ANSWER_S, lambda: self._confirmed() if self._asked == asked else None)
            self.hear(suspected(0, self.ranks.cycle, self._hang()))

    def _confirmed(self) -> None:
        """Its monitor was told that the rank hangs, or got no answer."""
        self._asked += 1
        if self.waits and self.stall is not None and self.ranks is not None:
            self.hurt(self.stall, cycle=self.ranks.cycle)
            self.job.wronged.append(f"{self.name} ends a rank of cycle {self.agent.cycle.record.cycle} that only waits")
        if self.ranks is not None and (self._is_hung or self.waits):
            self._is_found = True
            self.hear(found_hung(0, self.ranks.cycle, self._hang()))

    def _hang(self) -> RankHung:
        return replace(HANG, rank=self.member.place or 0, at_ns=round(self.clock() * 1e9))

    def _notice(self) -> None:
        assert self.ranks is not None
        waits_in, state = ("", "T") if self._is_hung else ("all_reduce", "S")
        quiet_s = 10.0 if self._is_hung else 0.0
        note = RankSnapshot(
            rank=self.member.place or 0, state=state, has_stack=True, waits_in=waits_in, quiet_s=quiet_s
        )
        self.hear(observed(0, self.ranks.cycle, note))

    def asked_to_stop(self, fault: Fault, *, well: bool) -> None:
        """SIGTERM."""
        self.hurt(fault, FOR_GOOD_S)
        self.ends_well = well
        self.hear(events.StopAsked(signal.SIGTERM))

    def abandoned(self, fault: Fault) -> None:
        """Who has started it is gone."""
        self.hurt(fault, FOR_GOOD_S)
        self.hear(Abandoned(text="its parent is gone"))

    def excluded(self, fault: Fault) -> None:
        """A rank asks for the node to be left out, and ends."""
        self.hurt(fault)
        self._asks(WorkloadAction.ExcludeThisNode)
        self.later_in_cycle(self.world.chance.uniform(0.05, 0.5), lambda: self._exits(1))

    def asks_for_shutdown(self, fault: Fault) -> None:
        """A rank asks for the end of the job."""
        self.hurt(fault, cycle=None if self.ranks is None else self.ranks.cycle)
        self._asks(WorkloadAction.ShutdownWorkload)

    def _asks(self, action: WorkloadAction) -> None:
        self.hear(WorkloadControl(action=action.name, description="enough", rank=self.member.place or 0, pid=1))


def _options(rules: m.Rules) -> Options:
    return Options(
        max_nodes=rules.max_nodes,
        min_healthy=rules.min_healthy,
        max_restarts=rules.max_restarts,
        checks_health=True,
    )


def _tells_of_own_failure(message: Any) -> bool:
    """Return True if a launcher says that its node has failed, and not only because of another one."""
    match message:
        case m.Report(state=state, cause=cause):
            return state is not NodeState.SUCCEEDED and not cause.follows
        case RankSnapshots(notes=notes):
            return any(note.is_stopped or (note.gone and not is_peer_loss(note.raised)) for note in notes)
    return isinstance(message, m.Goodbye)


class Listener(Process):
    """The lock, and the socket at the endpoint: whoever connects is kept until a leader takes the connection."""

    def __init__(self, owner: Launcher) -> None:
        super().__init__(owner.host, f"lock of {owner.name}")
        self.job = owner.job
        self.owner = owner
        self.record: DecisionRecord | None = None
        """That of the last decision, in the launcher's memory."""
        self.coordinator: CoordinatorProcess | None = None
        self.has_told = False
        """A leader has told everybody of the job's end."""
        self._early: list[tuple[Link, Any]] = []
        self._begin_leader()

    def accepts(self, link: Link) -> None:
        """A launcher has connected."""
        if self in link.ends and self.coordinator is not None:
            self._hand_over(self.coordinator)

    def received(self, link: Link, message: Any) -> None:
        """For a leader that hasn't taken the connection yet."""
        self._early.append((link, message))
        if self.coordinator is not None:
            self._hand_over(self.coordinator)

    def _begin_leader(self) -> None:
        self.owner.later(self.world.chance.uniform(0.05, 0.15), self._start)

    def _start(self) -> None:
        if self.is_alive and self.coordinator is None:
            self.coordinator = CoordinatorProcess(self.job, self)
            self._hand_over(self.coordinator)

    def _hand_over(self, coordinator: CoordinatorProcess) -> None:
        for link in list(self.links):
            coordinator.take(link, self)
        early, self._early = self._early, []
        for link, message in early:
            coordinator.call(lambda link=link, message=message: coordinator.received(link, message))
        for link in {link.number: link for link, _ in early}.values():
            if coordinator not in link.ends:  # it was given up meanwhile
                coordinator.call(lambda link=link: coordinator.link_broke(link))

    def leader_died(self, *, has_quit: bool) -> None:
        """It is replaced, unless it has done its work."""
        self.coordinator, self.has_told = None, self.has_told or has_quit
        if not has_quit:
            self._begin_leader()

    def owner_died(self) -> None:
        """The leader ends with its launcher, and the lock is free."""
        if self.record is None or self.record.decision.kind is not DecisionKind.END or self.coordinator is not None:
            self.job.lock_lost_s.append(self.world.now_s)
        if self.coordinator is not None:
            self.coordinator.has_quit = True
            self.coordinator.die(silently=not self.host.is_on)
        self.die(silently=not self.host.is_on)

    def died(self) -> None:
        """The lock is free."""
        if self.job.lock is self:
            self.job.lock = None


class CoordinatorProcess(Process):
    """`python -m megatron_ft.job`."""

    def __init__(self, job: Job, listener: Listener) -> None:
        super().__init__(listener.host, f"coordinator{len(job.coordinators)}@h{listener.host.number}")
        self.job = job
        self.listener = listener
        defined = m.JobDefinition(JOB, job.rules)
        self.machine = Coordinator(
            self.name, defined, record=listener.record, now_s=self.host.clock_s(), parts=LEADER_PARTS
        )
        self.numbers: dict[int, Link] = {}
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
        """So many effects after its next decision."""
        job.coordinators.append(self)
        self.world.tell(f"{self.name} starts")
        self._settle_soon = self._is_asked_to_end = False
        self.settle()

    def take(self, link: Link, listener: Listener) -> None:
        """A connection that was made to the socket."""
        link.ends[link.ends.index(listener)] = self
        listener.links.remove(link)
        self.links.append(link)
        self.numbers[link.number] = link

    def received(self, link: Link, message: Any) -> None:
        """From a launcher."""
        if isinstance(message, m.Hello):
            self._instances[link.number] = message.instance
            self.known.pop(message.instance, None)
        if link.number in self.numbers:
            self.job.snapshots.heard(self, self._instance_at(link), message)
            if _tells_of_own_failure(message):
                self._knows(link, 0.0)
        self._is_asked_to_end |= isinstance(message, m.Shutdown) and link.number in self.numbers
        self._do(self.machine.handle(actions.Heard(link.number, message), self.host.clock_s()))
        self._maybe_settle()

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        """A launcher has ended, or so it seems."""
        self.numbers.pop(link.number, None)
        self.world.tell(f"  {self.name}: {link.number} has ended{' silently' * silent}{', was reset' * reset}")
        if reset:
            self.resets.append(self.world.now_s)
        elif not silent:
            self._knows(link, GRACE_S)
        self._do(self.machine.handle(actions.Broken(link.number, silent, reset), self.host.clock_s()))
        self._maybe_settle()

    def _knows(self, link: Link, grace_s: float) -> None:
        self.known.setdefault(self._instances.get(link.number, ""), self.world.now_s + grace_s)

    def _instance_at(self, link: Link) -> str:
        return next((end.instance for end in link.ends if isinstance(end, Launcher)), "")

    def _maybe_settle(self) -> None:
        if self.machine.needs_settling and not self._settle_soon and self.is_alive:
            self._settle_soon = True
            self.later(0.0002, self._batch)

    def _batch(self) -> None:
        self._settle_soon = False
        self.settle()

    def settle(self) -> None:
        """Draw conclusions."""
        self._do(self.machine.settle(self.host.clock_s()))
        if self.is_alive:
            self.wake_at(self.machine.alarm_s, self._alarm)

    def _alarm(self) -> None:
        if self.host.clock_s() >= self.machine.alarm_s:
            self.settle()
        elif self.is_alive:
            self.wake_at(self.machine.alarm_s, self._alarm)

    def _do(self, asked: list[actions.CoordinatorEffect]) -> None:
        for effect in asked:
            if isinstance(effect, actions.Send):
                self.job.learning.coordinator_sends(self.name, self.world.now_s, effect)
                self.job.snapshots.sends(self.job, effect)
                if isinstance(effect.message, m.Beat) and effect.message.number:
                    self.job.snapshots.plans(self)
                for number in effect.links:
                    if not self.counts_effect():
                        return
                    if number in self.numbers:
                        if self.world.story is not None and not isinstance(effect.message, m.Beat):
                            self.world.tell(f"  {self.name} -> {number}: {str(effect.message)[:150]}")
                        self.numbers[number].send(self, effect.message)
                        self._note_place(effect.message, self.numbers[number])
                continue
            if not self.counts_effect():
                return
            self._do_one(effect)

    def _note_place(self, message: m.ToMember, link: Link) -> None:
        if (
            isinstance(message, Assignment)
            and message.place is not None
            and message.decision.kind is DecisionKind.START
        ):
            for end in link.ends:
                if isinstance(end, Launcher):
                    self.job.snapshots.asks(end.instance, message)

    def _do_one(self, effect: actions.CoordinatorEffect) -> None:
        if isinstance(effect, actions.Drop):
            link = self.numbers.pop(effect.link, None)
            if link is not None:
                link.close(self)
        elif isinstance(effect, actions.Decided):
            record = self.listener.record = effect.record
            decision = record.decision
            self.world.tell(f"{self.name} decides {decision} {record.instances}")
            if self._is_asked_to_end and decision.kind is DecisionKind.START:
                self.job.heedless.append(f"{self.name} decides cycle {decision.cycle}")
            self.job.snapshots.begins(decision)
            self.job.made.append(Made(self.world.now_s, decision, record.instances, self.name))
            self.dies_at_effect = self.dies_at_effect if self.dies_deciding is None else self.dies_deciding
        elif isinstance(effect, actions.Judged):
            self.world.tell(f"{self.name} judges {effect.verdict}")
            self.job.verdicts.append(Judged(self.world.now_s, effect.verdict, self))
        elif isinstance(effect, actions.Quit):
            self.has_quit = True
            self.die()

    def died(self) -> None:
        """Its launcher sees it end."""
        self.ended_s = self.world.now_s
        self.world.tell(f"{self.name} is gone")
        if self.listener.is_alive and self.listener.coordinator is self:
            self.listener.owner.call(lambda: self.listener.leader_died(has_quit=self.has_quit))
