"""One simulated run, from its plan to what it broke."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from megatron_ft.job.rules.decisions import DecisionKind
from megatron_ft.link.base.control import WorkloadAction
from megatron_ft.link.base.rerun import RerunState
from tests.simulation.check import violations
from tests.simulation.history import ends
from tests.simulation.job import FOR_GOOD_S, Job, Launcher
from tests.simulation.leader import CoordinatorProcess
from tests.simulation.plan import Fault, Hurt, Plan
from tests.simulation.world import ETCD, Host, World

HORIZON_S = 600.0
"""Every job is over by then, well or not."""
_HEAVY_LOSS = 0.3
"""Where so many packets are lost, any node may be taken for lost at any time."""


@dataclass
class Run:
    plan: Plan
    job: Job
    broken: list[str]
    story: list[str]


def simulate(plan: Plan, *, tell: bool = False) -> Run:
    world = World(random.Random(plan.seed ^ 0x5EED), plan.nodes + plan.spares)
    world.story = [] if tell else None
    world.reports_silence = plan.reports_silence
    world.latency_s, world.loss = plan.latency_s, plan.loss
    job = Job(world, plan)
    trouble = _Trouble(world, job)
    hosts = list(world.hosts)
    world.chance.shuffle(hosts)
    for host in hosts:
        delay_s = 0.0 if host.number == 0 else world.chance.choice((0.0, 0.0, 0.2, 2.0)) * world.chance.random()
        world.after(delay_s, lambda host=host: job.launch(host) if host.is_on else None)
    for fault in plan.faults:
        world.after(fault.at_s, partial(trouble.strikes, fault))
    try:
        world.run(HORIZON_S, lambda: world.now_s > max(3.0, trouble.until_s) and job.is_over())
    except Exception as error:  # noqa: BLE001 - whatever the machines raise, a user's job would end by it
        return Run(plan, job, [f"{type(error).__name__}: {error}"], world.story or [])
    if plan.loss >= _HEAVY_LOSS:
        lost = Fault(at_s=0.0, kind="packets_lost", which=0, seconds=HORIZON_S)
        trouble.parts(lost, itertools.combinations([ETCD, *(host.number for host in world.hosts)], 2), 0.0)
        job.struck.insert(0, Hurt(lost, 0.0, HORIZON_S))
    return Run(plan, job, violations(job), world.story or [])


def _freeze(launcher: Launcher, fault: Fault) -> None:
    launcher.hurt(fault, fault.seconds)
    launcher.freeze(fault.seconds)


def _reset_connection(launcher: Launcher, fault: Fault) -> None:
    if launcher.link is not None:
        launcher.hurt(fault)
        launcher.link.reset()


def _die_at_effect(launcher: Launcher, fault: Fault) -> None:
    launcher.hurt(fault, FOR_GOOD_S)
    launcher.dies_at_effect = fault.count


def _ill(launcher: Launcher, fault: Fault) -> None:
    launcher.hurt(fault, fault.seconds + 3)
    launcher.is_ill = True
    launcher.world.after(fault.seconds, lambda: setattr(launcher, "is_ill", False))


_OF_A_LAUNCHER: dict[str, Callable[[Launcher, Fault], None]] = {
    "rank_fails": lambda it, fault: it.call(lambda: it.rank_fails(fault)),
    "rank_hangs": lambda it, fault: it.call(lambda: it.rank_hangs(fault)),
    "launcher_frozen": _freeze,
    "connection_reset": _reset_connection,
    "dies_at_effect": _die_at_effect,
    "node_excluded": lambda it, fault: it.call(lambda: it.asks(fault, WorkloadAction.ExcludeThisNode)),
    "shutdown_asked": lambda it, fault: it.call(lambda: it.asks(fault, WorkloadAction.ShutdownWorkload)),
    "node_ill": _ill,
    "node_stopped": lambda it, fault: it.call(lambda: it.asked_to_stop(fault, well=fault.comes_back)),
}
"""What hits one launcher that is alive."""
_OF_A_LEADER: dict[str, Callable[[CoordinatorProcess, Fault], None]] = {
    "coordinator_killed": lambda it, _: it.die(),
    "coordinator_frozen": lambda it, fault: it.freeze(fault.seconds),
    "coordinator_dies_at_effect": lambda it, fault: setattr(
        it, "dies_at_effect", fault.count * max(1, len(it.numbers) // 4)
    ),
    "coordinator_dies_deciding": lambda it, fault: setattr(it, "dies_deciding", fault.count),
}
"""What hits the leader that has begun last."""


class _Trouble:
    def __init__(self, world: World, job: Job) -> None:
        self.world = world
        self.job = job
        self.until_s = 0.0
        """A launcher is still to come back."""

    def strikes(self, fault: Fault) -> None:
        if self.job.launchers and self.job.is_over():
            return
        self.world.tell(f"FAULT {fault}")
        self.job.struck.append(Hurt(fault, self.world.now_s, self.world.now_s + fault.seconds))
        alive = [launcher for launcher in self.job.launchers if launcher.is_alive]
        leaders = [process for process in self.job.coordinators if process.is_alive]
        if fault.kind in _OF_A_LEADER:
            if leader := max(leaders, key=lambda process: (not process.is_frozen, process.started_s), default=None):
                if fault.kind == "coordinator_frozen":  # as long as nobody can tell which of the two it is
                    self._touch([leader.host], fault)
                _OF_A_LEADER[fault.kind](leader, fault)
        elif fault.kind not in _OF_A_LAUNCHER:
            getattr(self, f"_{fault.kind}")(fault)
        elif alive:
            _OF_A_LAUNCHER[fault.kind](alive[fault.which % len(alive)], fault)

    def _host(self, fault: Fault) -> Host:
        return self.world.hosts[fault.which % len(self.world.hosts)]

    def _touch(self, hosts: Iterable[Host], fault: Fault) -> None:
        """Note a fault on these hosts, which as long as it lasts may be the cause of what their launchers do."""
        self.job.network = True
        for host in hosts:
            host.hurts.append(Hurt(fault, self.world.now_s, self.world.now_s + fault.seconds))

    def _again(self, host: Host, fault: Fault) -> None:
        """Let a scheduler start a new launcher there; where the number of launchers is known, none does."""
        if not fault.comes_back or self.job.plan.rules.launchers:
            return
        delay_s = fault.seconds + 0.1
        self.until_s = max(self.until_s, self.world.now_s + delay_s + 0.001)

        def start() -> None:
            host.is_on = True
            is_busy = any(launcher.is_alive and launcher.host is host for launcher in self.job.launchers)
            has_ended = any(made.decision.kind is DecisionKind.END for made in self.job.made)
            is_of_next = host.number == 0 and has_ended  # it would begin another run of the job
            if not is_busy and not is_of_next and not self._has_ended():
                self.job.launch(host).hurt(fault)

        self.world.after(delay_s, start)

    # -- ranks and launchers ----------------------------------------------------------------------------------

    def _ranks_rerun(self, fault: Fault) -> None:
        """All ranks of the cycle that runs end, one shortly after the other; the result of one was rejected."""
        is_over = fault.kind == "rerun_concluded"
        code, state = (17, "RERUNNING_FROM_CHECKPOINT") if is_over else (16, "WILL_RERUN_FROM_CHECKPOINT")
        running = [(each, each.ranks.cycle) for each in self.job.launchers if each.is_alive and each.ranks is not None]
        own, its_cycle = running[fault.which % len(running)] if running else (None, 0)
        for each, cycle in running:
            if cycle == its_cycle:
                each.call(partial(each.reruns, fault, code, RerunState(state=state, own=each is own)))

    _rerun_concluded = _ranks_rerun

    def _launcher_killed(self, fault: Fault) -> None:
        """``dies_last``: one whose rank still runs when others of the cycle have finished."""
        is_last = fault.kind == "dies_last"
        found = [each for each in self.job.launchers if each.is_alive and (each.is_last or not is_last)]
        if found:
            launcher = found[fault.which % len(found)]
            launcher.hurt(fault, FOR_GOOD_S)
            launcher.die()
            if not is_last:
                self._again(launcher.host, fault)
        elif is_last and not self.job.is_over():
            self.world.after(0.02, lambda: self._launcher_killed(fault))

    _dies_last = _launcher_killed

    def _all_stopped(self, fault: Fault) -> None:
        for launcher in self.job.launchers:
            if launcher.is_alive:
                delay_s = self.world.chance.uniform(0.0, 1.0)
                launcher.later(delay_s, partial(launcher.asked_to_stop, fault, well=True))

    def _has_ended(self) -> bool:
        """Return True if no launcher is to come any more: in etcd it would begin another run of the job."""
        return self.job.is_over() or (self.job.plan.in_etcd and bool(ends(self.job)))

    def _newcomer(self, fault: Fault) -> None:
        if self._has_ended():
            return
        host = Host(self.world, len(self.world.hosts))
        self.world.hosts.append(host)
        self.job.launch(host)

    # -- hosts and network ------------------------------------------------------------------------------------

    def _host_off(self, fault: Fault) -> None:
        host = self._host(fault)
        if host.is_on:
            for launcher in self.job.launchers:
                if launcher.host is host and launcher.is_alive:
                    launcher.hurt(fault, FOR_GOOD_S)
            self.job.network = True
            host.power_off()
            self._again(host, fault)

    def _host_frozen(self, fault: Fault) -> None:
        self._touch([self._host(fault)], fault)
        self._host(fault).freeze(fault.seconds)

    def parts(self, fault: Fault, pairs: Iterable[tuple[int, int]], from_s: float) -> None:
        """Take note that a fault parts these hosts: no connection does without one of its directions."""
        self.job.network = True
        parted_from: dict[int, set[int]] = {}
        for a, b in itertools.chain.from_iterable(itertools.permutations(pair) for pair in pairs):
            parted_from.setdefault(a, set()).add(b)
        self.job.apart.append((Hurt(fault, from_s, from_s + fault.seconds), parted_from))

    def _cut(self, pairs: Iterable[tuple[int, int]], fault: Fault, *, both_ways: bool = True) -> None:
        """Cut the way from the first to the second host of each pair."""
        ways = {way for a, b in pairs for way in ((a, b), (b, a))[: 1 + both_ways]}
        self.parts(fault, ways, self.world.now_s)
        self.world.cut(ways)
        self.world.after(fault.seconds, lambda: self.world.heal(ways))

    def _host_cut(self, fault: Fault) -> None:
        host = self._host(fault)
        self._touch([host], fault)
        others = [other.number for other in self.world.hosts if other is not host] * (fault.kind != "etcd_cut")
        self._cut([(host.number, other) for other in (*others, ETCD)], fault)

    _etcd_cut = _host_cut

    def _split(self, fault: Fault) -> None:
        chance = random.Random(fault.which)
        side = {host.number for host in self.world.hosts if chance.random() < 0.5}
        self._touch(self.world.hosts, fault)
        numbers = [*(host.number for host in self.world.hosts), ETCD]
        self._cut([(a, b) for a, b in itertools.combinations(numbers, 2) if (a in side) != (b in side)], fault)

    def _pair_cut(self, fault: Fault) -> None:
        pair = random.Random(fault.which).sample(self.world.hosts, 2)
        self._touch(pair, fault)
        self._cut([(pair[0].number, pair[1].number)], fault)

    def _one_way_cut(self, fault: Fault) -> None:
        """Nothing gets from one host to another one or to all others, or from all others to it."""
        chance, host = random.Random(fault.which), self._host(fault)
        others = [other for other in self.world.hosts if other is not host]
        if chance.random() < 0.3:
            others = [chance.choice(others)]
        ways = [(host.number, other.number) for other in others]
        if chance.random() < 0.5:
            ways = [(b, a) for a, b in ways]
        self._touch([host, *(others if len(others) == 1 else ())], fault)
        self._cut(ways, fault, both_ways=False)

    # -- etcd -------------------------------------------------------------------------------------------------

    def _etcd_away(self, fault: Fault) -> None:
        etcd = self.job.etcd.model
        etcd.is_away = True
        self.parts(fault, [(host.number, ETCD) for host in self.world.hosts], self.world.now_s)
        self.world.after(fault.seconds, lambda: setattr(etcd, "is_away", False))

    def _answers_lost(self, fault: Fault) -> None:
        self.job.etcd.model.loses_answers += 1 + fault.count
