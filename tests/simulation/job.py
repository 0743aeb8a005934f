"""A job in the simulated world: launchers with toy ranks, around the real machines."""

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

from megatron_ft.config.config import ConfigValues
from megatron_ft.config.launcher_options import ANY_FAILED, MIN_HEALTHY
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import actions, etcd_keys
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionRecord
from megatron_ft.job.rules.etcd_keys import EtcdAway, Seen
from megatron_ft.job.rules.member import HOLDER_STAYS_S, Member
from megatron_ft.launcher.cycle.parts import launcher_parts
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import Agent, AgentPhase
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.link.base.codec import PartMessage
from megatron_ft.link.base.control import WorkloadAction, WorkloadControl
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.mailbox import Mailbox
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.base.rerun import RerunState
from megatron_ft.link.facts.launcher import NodeHealth, RankExited, RankStarted
from megatron_ft.link.messages.monitor_messages import Collect, Release
from megatron_ft.memory.rules.snapshots import Kept
from tests.simulation.leader import ENDPOINT, JOB, CoordinatorProcess, Etcd, Judged, Lock
from tests.simulation.plan import Fault, Hurt, Plan
from tests.simulation.world import Host, Link, Process, World
from tests.support.agents import HANG as SECTION_HANG
from tests.support.agents import attached, found_hung, observed

FOR_GOOD_S = 1e9
_LOOKS_S = (0.3, 0.9)
_LED_LOOKS_S = (2.0, 3.0)
"""Looks at the lock in etcd: from one to the next, and from one to the next while a leader leads."""
_STEP_S = 0.5
_SAME_ITERATION = 7
"""Where each cycle gets in a job that makes no progress."""

LOST_A_PEER = "RuntimeError: gloo: connection closed by peer"
BOARD = BoardSnapshot(iteration=0, first_iteration=0)
HANG = replace(SECTION_HANG, iteration=1, at_ns=0)


@dataclass
class Trained:
    """One node's ranks in one cycle, from when to when in true time, and the decision by which they were started."""

    cycle: int
    launcher: Launcher
    from_s: float
    held: Assignment
    to_s: float | None = None


@dataclass(frozen=True)
class Made:
    """A decision that is durable, and the name of the leader that has made it."""

    at_s: float
    decision: Decision
    members: tuple[str, ...]
    by: str


@dataclass
class Job:
    """What is common to all launchers, and what happened."""

    world: World
    plan: Plan
    etcd: Etcd = field(init=False)
    steps: Counter[int] = field(default_factory=Counter)
    """Number of steps that the ranks of each cycle have made together."""
    launchers: list[Launcher] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    verdicts: list[Judged] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    coordinators: list[CoordinatorProcess] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    locks: dict[str, Lock] = field(default_factory=dict)
    """Sockets of leaders by address."""
    lock_lost_s: list[float] = field(default_factory=list)
    """When a launcher died that held the endpoint, and the job wasn't over."""
    stores: dict[str, str] = field(default_factory=dict)
    """Stores that were opened, and the launcher (instance) that has opened each."""
    done_s: float = 0.0
    heedless: list[str] = field(default_factory=list)
    """Cycles that were proposed by a coordinator which had been asked for the end of the job."""
    broken_cycles: set[int] = field(default_factory=set)
    """Those whose ranks have lost one of them."""
    struck: list[Hurt] = field(default_factory=list)
    """All faults that have happened."""
    apart: list[tuple[Hurt, dict[int, set[int]]]] = field(default_factory=list)
    """Faults that have parted hosts (by number) from others."""
    network: bool = False
    """A fault has hit the network, or a host."""

    def __post_init__(self) -> None:
        self.etcd = Etcd(self.world, self.decided)
        if self.plan.had_former:
            self.etcd.make_former()
        if self.plan.tells_progress:
            self.world.after(0.0, self.step)

    def launch(self, host: Host) -> Launcher:
        launcher = Launcher(self, host)
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
            if are_all and not any(each.is_hung or each.host.is_frozen for each in launchers):
                pairs = itertools.combinations(hosts, 2) if self.plan.shares_network else ()
                self.steps[cycle] += not any(self.world.is_cut(a, b) for a, b in pairs)
        if not self.launchers or not self.is_over():
            self.world.after(_STEP_S, self.step)

    def decided(self, record: DecisionRecord) -> None:
        by = record.decision.id.rpartition(".")[0]
        if self.plan.in_etcd and not record.decision.number and not any(each.member.decided for each in self.launchers):
            self.made.clear()  # no launcher has heard of the founding before
        self.made.append(Made(self.world.now_s, record.decision, record.instances, by))

    def is_over(self) -> bool:
        return all(not launcher.is_alive for launcher in self.launchers)


class Launcher(Process):
    """One `ft_launcher`: its two machines, and a toy of everything that they leave to others."""

    def __init__(self, job: Job, host: Host) -> None:
        number, plan = len(job.launchers), job.plan
        super().__init__(host, f"launcher{number}@h{host.number}")
        self.job = job
        self.instance = f"i{number}"
        self.clock = host.clock_s
        self.code: int | None = None
        self.left_by = ""
        self.how: events.Exit | None = None
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
        self.lock: Lock | None = None
        """The lock, if this launcher holds it."""
        self.saw_etcd_s = FOR_GOOD_S
        """When etcd has answered it first."""
        self._effects: Mailbox[Callable[[], None]] = Mailbox(lambda do: do(), self.counts_effect)
        self._begun: Assignment | None = None
        self._error = ""
        self.is_hung = False
        self._rerun: RerunState | None = None
        identity = m.Identity(
            job=JOB,
            rules=plan.rules,
            instance=self.instance,
            name=f"h{host.number}",
            host=f"h{host.number}",
            endpoint="etcd" if plan.in_etcd else ENDPOINT,
            rank=None if plan.seed % 2 else host.number,
            started_s=host.clock_s(),
            is_in_etcd=plan.in_etcd,
        )
        self.member = Member(identity, now_s=host.clock_s(), chance=random.Random(job.world.chance.random()))
        options = Options(
            instance=self.instance,
            max_nodes=plan.rules.max_nodes,
            given=ConfigValues(
                restart_policy=MIN_HEALTHY if plan.rules.min_healthy else ANY_FAILED, watch_collectives="off"
            ),
            max_restarts=plan.rules.max_restarts,
            checks_health=True,
        )
        self.agent = Agent(options, launcher_parts(options, Pauses(), Kept()))
        self._agent_ns = self.agent.alarm_ns
        """When the agent is to be told the time; only an event changes that."""
        if plan.in_etcd:
            self.later(job.world.chance.random(), self._look)
        else:
            self._take_endpoint()
        self.later(0.0, self.tick)
        self.later(0.0, lambda: self.hear(events.Tick()))

    @property
    def place(self) -> int:
        """Of its node; 0 if it has none."""
        return 0 if self.member.decided is None else self.member.decided.place or 0

    def hurt(self, fault: Fault, seconds: float = 0.0, *, cycle: int | None = None) -> None:
        """Take note of a fault that hits it now, and for how long."""
        now_s = self.world.now_s
        self._hurts.append(Hurt(fault, now_s, now_s + seconds, cycle))

    @property
    def hurts(self) -> list[Hurt]:
        """What faults did to it, or to its host while it was there."""
        ended_s = self.world.now_s if self.ended_s is None else self.ended_s
        of_host = [each for each in self.host.hurts if each.until_s >= self.started_s and each.from_s <= ended_s]
        return [*self._hurts, *of_host]

    # -- the lock ---------------------------------------------------------------------------------------------

    def _take_endpoint(self) -> None:
        """Hold the lock, if this is the endpoint's host, as soon as no other launcher does."""
        if self.host.number:
            return
        if ENDPOINT in self.job.locks:
            self.later(0.5, self._take_endpoint)
        else:
            self.lock = Lock(self, ENDPOINT)
            self.member.owns = True

    def _look(self) -> None:
        """See who leads, by the key in etcd, and try to lead where nobody does."""
        if self.code is not None:
            return
        if self.lock is not None and self.lock.has_told:
            self.lock.give_up()
        may_lead = self.lock is None and self.member.standing.phase is not m.NodePhase.EXCLUDED
        address, call = f"h{self.host.number}:{self.world.next_number()}", self.job.etcd.call_from(self.host)

        def ask() -> Seen:
            seen = etcd_keys.look(call, JOB)
            self.saw_etcd_s = min(self.saw_etcd_s, self.world.now_s)
            return (etcd_keys.take(call, JOB, address) if may_lead and not seen.epoch else None) or seen

        self.job.etcd.ask(self, ask, self._looked)

    def _looked(self, result: Callable[[], Seen]) -> None:
        if self.code is not None:
            return
        try:
            seen = result()
        except EtcdAway as error:
            self.member.problem = str(error)
        else:
            if self.lock is not None and self.lock.held is not None and self.lock.held.epoch != seen.epoch:
                self.lock.give_up()
            if seen.lease:
                self.lock = Lock(self, seen.address, seen)
            self.follow(self.member.leader_at(seen.address, seen.epoch, seen.revision, self.clock()))
        self.later(self.world.chance.uniform(*(_LED_LOOKS_S if self.member.is_led else _LOOKS_S)), self._look)

    # -- the machines -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Tell the control plane's machine the time, and how far the ranks are."""
        cycle = None if self.ranks is None or not self.runs() else self.ranks.cycle
        steps = self.job.steps[cycle] if self.job.plan.tells_progress and cycle is not None else None
        self.follow(self.member.tick(self.clock(), steps))

    def follow(self, asked: Iterable[actions.MemberEffect]) -> None:
        """Bring about what the control plane's machine asks for."""
        self._do([partial(self._do_for_member, effect) for effect in asked])

    def hear(self, event: events.Event) -> None:
        """Tell the agent's machine, and bring about what it asks for."""
        if self.is_alive and self.code is None:
            asked = self.agent.handle(event, round(self.clock() * 1e9), self._seen())
            self._agent_ns = self.agent.alarm_ns
            self._do([partial(self._do_for_agent, effect) for effect in asked])

    def _do(self, asked: list[Callable[[], None]]) -> None:
        """Do one after the other; this process may die in between."""
        if self._effects.post(asked) and self.is_alive and self.code is None:
            self.wake_at(self._due_s(), self._alarm)

    def _due_s(self) -> float:
        alarm_ns = self._agent_ns
        return self.member.alarm_s if alarm_ns is None else min(self.member.alarm_s, alarm_ns / 1e9)

    def _alarm(self) -> None:
        if self.clock() >= self.member.alarm_s:
            self.tick()
        if self._agent_ns is not None and self.clock() * 1e9 >= self._agent_ns:
            self.hear(events.Tick())
        if self.is_alive and self.code is None:
            self.wake_at(self._due_s(), self._alarm)

    def _do_for_member(self, effect: actions.MemberEffect) -> None:
        match effect:
            case actions.Connect(address):
                self._connect(address)
            case actions.Transmit(message):
                if self.link is not None:
                    if self.world.story is not None and not isinstance(message, m.Beat):
                        self.world.tell(f"  {self.name} ({self.link.number}) -> {str(message)[:150]}")
                    self.link.send(self, message)
            case actions.OpenStore():
                store = f"{self.name}:{len(self.job.stores)}"
                self.job.stores[store] = self.instance
                self.later(0.002, lambda: self.follow(self.member.store_opened(store, self.clock())))
            case _:
                if isinstance(effect, Assignment):
                    self._begun = self._begun if effect.place is None else effect
                elif isinstance(effect, m.Stay):
                    self.stays_since_s = self.world.now_s
                self.hear(effect)

    def _do_for_agent(self, effect: events.Effect) -> None:
        match effect:
            case m.Tell(text):
                self.world.tell(f"{self.name} says: {text}")
                self.job.said.append(text)
            case events.LauncherExit(how, code, text):
                self.world.tell(f"{self.name} leaves with {code}: {text}")
                self.code, self.left_by, self.how = code, text, how
                self._exits_when_all_know()
            case _ if isinstance(effect, m.NodeMessage | PartMessage):
                self.follow(self.member.tell(effect, self.clock()))
            case _:
                self._do_to_ranks(effect)

    # -- the connection ---------------------------------------------------------------------------------------

    def _exits_when_all_know(self) -> None:
        """Stay until the leader has told all others of the job's end, if this launcher holds the lock."""
        until_s = self.world.now_s + HOLDER_STAYS_S + 1.0
        self._disconnect(resets=False)
        self._ranks_ended(is_failure=False)

        def look() -> None:
            if self.lock is None or not self.lock.is_needed or self.world.now_s >= until_s:
                self.die()
            else:
                self.later(0.05, look)

        look()

    def _connect(self, address: str) -> None:
        self._disconnect()
        if not address:
            return
        host = self.world.hosts[int(address[1:].partition(":")[0])]
        if self.world.is_cut(self.host, host) or self.world.now_s < host.frozen_until_s:
            return  # nobody answers, and the machine gives up by itself
        lock = self.job.locks.get(address)
        if lock is None:
            self.later(0.001, lambda: self.follow(self.member.broken(self.clock())) if self.link is None else None)
            return
        link = self.link = Link(self.world, self, lock)
        within_s = self.world.handshake_s(self.host, host)
        self.world.after(within_s, lock.hand_over)
        self.later(within_s, lambda: self.follow(self.member.opened(self.clock())) if self.link is link else None)

    def _disconnect(self, *, resets: bool = True) -> None:
        if self.link is not None:
            link, self.link = self.link, None
            link.close(self, resets=resets)

    def received(self, link: Link, message: Any) -> None:
        if link is self.link:
            self.follow(self.member.heard(message, self.clock()))

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        if link is self.link:
            self.link = None
            self.follow(self.member.broken(self.clock()))

    def died(self) -> None:
        """Its ranks die with it. With their host's power nothing ends their connections to the others."""
        self.ended_s = self.world.now_s
        self.world.tell(f"{self.name} is gone")
        self._ranks_ended(is_failure=self.host.is_on)
        if self.lock is not None:
            self.lock.give_up(is_released=self.code is not None)

    # -- its ranks: one on each node, a toy --------------------------------------------------------------------

    def _seen(self) -> events.Readings:
        iteration = int(10.0 * self.world.now_s) if self.job.plan.makes_progress else _SAME_ITERATION
        output = CrashOutput(self._error, rerun=self._rerun)
        return events.Readings({0: BOARD._replace(iteration=iteration)}, {0: output}, {0: self.is_hung}, {0: {}})

    def _do_to_ranks(self, effect: events.Effect) -> None:
        chance = self.world.chance
        match effect:
            case events.CheckHealth():
                self.later(chance.uniform(0.0, 0.5 if self.ranks is None else 0.01), self._check_health)
            case events.StartRanks():
                self.later(chance.uniform(0.0, 0.01), self._start_ranks)
            case events.SignalRanks(_, number):
                code = 0 if self.ends_well and not self.is_hung else -number
                self.later_in_cycle(chance.uniform(0.1, 1.0), lambda: self._exits(code, by_us=True))
            case Release() if self.is_hung:
                self.later_in_cycle(0.1, lambda: self._exits(-9, by_us=True))
            case events.TerminateRanks():
                self.later(chance.uniform(0.05, 0.4), self._terminate)
            case events.OrderMonitor(_, Collect()):
                self.later_in_cycle(chance.uniform(0.05, 1.5), self._notice)

    def _check_health(self) -> None:
        if self.agent.phase is AgentPhase.CHECKING:
            code = int(self.is_ill)
            text = f"exited with code {code}" if code else ""
            health = NodeHealth(cycle=0, good=not code, text=text, exit_code=code, last_line="", seconds=0.1)
            self.hear(health)

    def _start_ranks(self) -> None:
        if not self.agent.wants_ranks:
            self.hear(events.NotStarted())
            return
        assert self._begun is not None
        cycle, place, world = self.agent.cycle.cycle, self.place, self._begun.decision.world
        self.world.tell(f"{self.name} starts ranks of cycle {cycle} at place {place}")
        self._error, self._rerun, self.is_hung = "", None, False
        trained = self.ranks = Trained(cycle, self, self.world.now_s, self._begun)
        self.job.trained.append(trained)
        self.hear(events.RanksMet([place], place, world, world))
        now_ns = round(self.clock() * 1e9)
        started = RankStarted(rank=0, local_rank=0, pid=1, at_ns=now_ns)
        for event in (started, events.RanksStarted(), attached(0, cycle, now_ns)):
            self.hear(event)
        left_s = max(0.5, self.job.plan.work_s - self.job.done_s) + self.world.chance.uniform(0.0, 0.3)
        self.later_in_cycle(left_s, lambda: None if self.is_hung else self._exits(0))

    def later_in_cycle(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call after some seconds, unless the rank has ended by then."""
        trained = self.ranks
        self.later(delay_s, lambda: action() if self.ranks is trained and self.runs() else None)

    @property
    def is_last(self) -> bool:
        """Its rank runs, and some other of the cycle has ended with 0."""
        if self.ranks is None or not self.runs():
            return False
        same = [each for each in self.job.trained if each.cycle == self.ranks.cycle]
        return any(each.to_s is not None for each in same)

    def runs(self) -> bool:
        return self.ranks is not None and self.ranks.to_s is None

    def _exits(self, code: int, *, by_us: bool = False) -> None:
        self._ranks_ended(is_failure=code != 0 and not by_us)
        self._hear_exit(code, by_us=by_us)

    def _hear_exit(self, code: int, *, by_us: bool = False) -> None:
        cycle, sent = self.agent.cycle, (9, 15) if by_us else ()
        at_ns = round(self.clock() * 1e9)
        self.hear(RankExited(rank=cycle.ranks[0], cycle=cycle.cycle, exitcode=code, at_ns=at_ns, signals_sent=sent))

    def _terminate(self) -> None:
        if self.runs():
            self._exits(-15, by_us=True)
        self.hear(events.RanksEnded())

    def _ranks_ended(self, *, is_failure: bool) -> None:
        trained = self.ranks
        if trained is not None and trained.to_s is None:
            trained.to_s = self.world.now_s
            self.job.done_s = max(self.job.done_s, self.job.done_s + 0.2 * (trained.to_s - trained.from_s) - 0.5)
            if is_failure and trained.cycle not in self.job.broken_cycles and not self.job.plan.rules.min_healthy:
                self.job.broken_cycles.add(trained.cycle)
                for other in self.job.launchers:
                    has_lost_it = other.ranks is not None and other.runs() and other.ranks.cycle == trained.cycle
                    if has_lost_it and self.world.chance.random() < 0.5:
                        other.later_in_cycle(self.world.chance.uniform(0.01, 1.0), other.loses_a_peer)

    def loses_a_peer(self) -> None:
        """Its rank fails because of another one."""
        if not self.is_hung:
            self._error = LOST_A_PEER
            self._exits(1)

    def _notice(self) -> None:
        assert self.ranks is not None
        waits_in, state = ("", "T") if self.is_hung else ("all_reduce", "S")
        quiet_s, rank = 10.0 if self.is_hung else 0.0, self.place
        note = RankSnapshot(rank=rank, state=state, has_stack=True, waits_in=waits_in, quiet_s=quiet_s)
        self.hear(observed(0, self.ranks.cycle, note))

    # -- faults -----------------------------------------------------------------------------------------------

    def rank_fails(self, fault: Fault) -> None:
        if self.ranks is not None and self.runs():
            self.hurt(fault, cycle=self.ranks.cycle)
            self._exits(-9)

    def reruns(self, fault: Fault, code: int, state: RerunState) -> None:
        """Megatron's rerun state machine ends the rank in a moment, as it ends all of the job."""

        def ends() -> None:
            assert self.ranks is not None
            self.hurt(fault, cycle=self.ranks.cycle)
            self._rerun = state
            self._ranks_ended(is_failure=False)
            self._hear_exit(code)

        self.later_in_cycle(self.world.chance.uniform(0.0, 0.2), ends)

    def rank_hangs(self, fault: Fault) -> None:
        """Its rank hangs, and a monitor finds that."""
        if self.ranks is not None and self.runs() and not self.job.plan.rules.min_healthy:
            self.hurt(fault, cycle=self.ranks.cycle)
            self.is_hung = True
            verdict = replace(HANG, rank=self.place, at_ns=round(self.clock() * 1e9))
            self.hear(found_hung(0, self.ranks.cycle, verdict))
            self.later_in_cycle(self.world.chance.uniform(0.05, 1.5), self._notice)

    def asked_to_stop(self, fault: Fault, *, well: bool) -> None:
        """Its launcher gets SIGTERM."""
        self.hurt(fault, FOR_GOOD_S)
        self.ends_well = well
        self.hear(events.StopAsked(signal.SIGTERM))

    def asks(self, fault: Fault, action: WorkloadAction) -> None:
        """Its rank asks for the end of the job, or for its node to be left out, and ends then."""
        if self.ranks is None or not self.runs():
            return
        is_excluded = action is WorkloadAction.ExcludeThisNode
        self.hurt(fault, cycle=None if is_excluded else self.ranks.cycle)
        self.hear(WorkloadControl(action=action.name, description="enough", rank=self.place, pid=1))
        if is_excluded:
            self.later_in_cycle(self.world.chance.uniform(0.05, 0.5), lambda: self._exits(1))
