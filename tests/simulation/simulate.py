"""One simulated run, from its plan to what it broke."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_ft.core.rerun import RerunState
from tests.simulation.check import violations
from tests.simulation.job import FOR_GOOD_S, CoordinatorProcess, Hurt, Job, Launcher
from tests.simulation.plan import Fault, Plan
from tests.simulation.snapshots import Snapshots
from tests.simulation.world import Host, World

__all__ = ["HORIZON_S", "Run", "simulate"]

_LOOKS_AGAIN_S = 0.02
_OUTAGE_S = 4.0
"""A node that gets no message through for longer may be taken for lost."""
_BREATH_S = 0.0

HORIZON_S = 600.0
"""Every job is over by then, well or not."""


@dataclass
class Run:
    """What came of a plan."""

    plan: Plan
    job: Job
    broken: list[str]
    events: int
    story: list[str]
    hit: list[tuple[float, str]]
    """The faults that happened, and when."""


def simulate(plan: Plan, *, tell: bool = False) -> Run:
    """Let it happen."""
    world = World(random.Random(plan.seed ^ 0x5EED), plan.nodes + plan.spares)
    world.story = [] if tell else None
    world.reports_silence = plan.reports_silence
    world.latency_s, world.loss = plan.latency_s, plan.loss
    hosts = world.hosts
    job = Job(
        world,
        plan.rules,
        plan.work_s,
        learns=plan.learns,
        makes_progress=plan.makes_progress,
        tells_progress=plan.tells_progress,
        shares_network=plan.shares_network,
    )
    if plan.tells_progress:
        world.after(0.0, job.step)
    trouble = _Trouble(world, job, len(plan.faults))
    job.snapshots_s = plan.snapshots_s
    job.snapshots = Snapshots(plan.seed, plan.poisons, trouble, copies=plan.copies)
    order = list(range(len(hosts)))
    world.chance.shuffle(order)
    for number in order:
        rank = number if plan.has_ranks else None
        delay_s = 0.0 if number == 0 else world.chance.choice((0.0, 0.0, 0.2, 2.0)) * world.chance.random()
        world.after(delay_s, lambda host=hosts[number], rank=rank: trouble.launch(host, rank))
    for fault in plan.faults:
        world.after(fault.at_s, lambda fault=fault: trouble.strikes(fault))
    world.run(HORIZON_S, lambda: world.now_s > max(3.0, trouble.until_s) and job.is_over())
    trouble.note_stalls()
    return Run(plan, job, violations(plan, job, trouble), world.events, world.story or [], trouble.hit)


def _outages(stalls: Iterable[tuple[float, float, frozenset[int]]]) -> Iterator[tuple[float, float, frozenset[int]]]:
    """Yield when two hosts had hardly anything of each other for long."""
    last: dict[frozenset[int], tuple[float, float]] = {}
    for from_s, until_s, hosts in sorted(stalls, key=lambda stall: stall[0]):
        began_s, ended_s = last.get(hosts, (from_s, until_s))
        if from_s > ended_s + _BREATH_S:
            yield from [(began_s, ended_s, hosts)] if ended_s - began_s >= _OUTAGE_S else ()
            began_s, ended_s = from_s, until_s
        last[hosts] = began_s, max(ended_s, until_s)
    for hosts, (began_s, ended_s) in last.items():
        if ended_s - began_s >= _OUTAGE_S:
            yield began_s, ended_s, hosts


def _both_ways(pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    return {way for a, b in pairs for way in ((a, b), (b, a))}


def _has_running_ranks(launcher: Launcher) -> bool:
    return launcher.ranks is not None and launcher.ranks.to_s is None


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


_OF_A_LAUNCHER: dict[str, Callable[[Launcher, Fault], object]] = {
    "rank_fails": lambda it, fault: it.call(lambda: it.rank_fails(fault)),
    "rank_hangs": lambda it, fault: it.call(lambda: it.rank_hangs(fault)),
    "rank_stalls": lambda it, fault: it.call(lambda: it.rank_stalls(fault)),
    "rank_blocks": lambda it, fault: it.call(lambda: it.rank_blocks(fault)),
    "launcher_frozen": _freeze,
    "connection_reset": _reset_connection,
    "dies_at_effect": _die_at_effect,
    "node_excluded": lambda it, fault: _has_running_ranks(it) and it.call(lambda: it.excluded(fault)),
    "shutdown_asked": lambda it, fault: _has_running_ranks(it) and it.call(lambda: it.asks_for_shutdown(fault)),
    "keeper_replaced": lambda it, _: it.keeper and it.call(it.keeper.replaced),
    "segment_rots": lambda it, _: it.keeper and it.keeper.rots(),
}
"""What hits one launcher that is alive."""


class _Trouble:
    """What is done to the world."""

    def __init__(self, world: World, job: Job, faults: int) -> None:
        self.world = world
        self._faults = faults
        self.job = job
        self.until_s = 0.0
        """Somebody is still to come back."""
        self.network = False
        self.apart: list[tuple[Fault, float, float, dict[int, set[int]]]] = []
        """By which fault, from when until when each host was parted from which others."""
        self.hit: list[tuple[float, str]] = []
        self.struck: list[Fault] = []
        """The same, as they were drawn."""

    def launch(self, host: Host, rank: int | None) -> None:
        """At the beginning, unless it is off by then."""
        if host.is_on:
            self.job.launch(host, rank=rank)

    def strikes(self, fault: Fault) -> None:
        """One fault, now."""
        if self.job.launchers and self.job.is_over():
            return
        self.world.tell(f"FAULT {fault}")
        self.hit.append((self.world.now_s, fault.kind))
        self.struck.append(fault)
        if fault.kind not in _OF_A_LAUNCHER:
            getattr(self, f"_{fault.kind}")(fault)
        elif (launcher := self._launcher(fault)) is not None:
            _OF_A_LAUNCHER[fault.kind](launcher, fault)

    def note_stalls(self) -> None:
        """Take two hosts for parted where what was sent between them was lost again and again, for long."""
        for from_s, until_s, hosts in _outages(self.world.stalls):
            fault = Fault(at_s=from_s, kind="packets_lost", which=0, seconds=until_s - from_s)
            a, b = hosts
            self.network = True
            self.apart.append((fault, from_s, until_s, {a: {b}, b: {a}}))
            self.hit.append((from_s, fault.kind))
            self.struck.append(fault)
        order = sorted(range(len(self.hit)), key=lambda at: self.hit[at][0])
        self.hit[:], self.struck[:] = [self.hit[at] for at in order], [self.struck[at] for at in order]

    # -- whom it hits -----------------------------------------------------------------------------------------

    def _launcher(self, fault: Fault) -> Launcher | None:
        alive = [launcher for launcher in self.job.launchers if launcher.is_alive]
        return alive[fault.which % len(alive)] if alive else None

    def _coordinator(self) -> CoordinatorProcess | None:
        alive = [process for process in self.job.coordinators if process.is_alive]
        alive.sort(key=lambda process: process.is_frozen)
        return alive[0] if alive else None

    def _host(self, fault: Fault) -> Host:
        return self.world.hosts[fault.which % len(self.world.hosts)]

    def _touch(self, hosts: list[Host], fault: Fault, seconds: float) -> None:
        """Note a fault on these hosts, which for so many seconds may be the cause of what their launchers do."""
        for host in hosts:
            host.hurts.append(Hurt(fault, self.world.now_s, self.world.now_s + seconds))

    def _again(self, host: Host, fault: Fault, delay_s: float) -> None:
        """Somebody starts a new launcher there."""
        self.until_s = max(self.until_s, self.world.now_s + delay_s + 0.001)

        def start() -> None:
            busy = any(launcher.is_alive and launcher.host is host for launcher in self.job.launchers)
            if not host.is_on or busy or self.job.is_over():
                return
            self.job.launch(host).hurt(fault)

        self.world.after(delay_s, start)

    # -- what happens -----------------------------------------------------------------------------------------

    def _ranks_rerun(self, fault: Fault) -> None:
        self._end_by_rerun(fault, 16, "WILL_RERUN_FROM_CHECKPOINT")

    def _rerun_concluded(self, fault: Fault) -> None:
        self._end_by_rerun(fault, 17, "RERUNNING_FROM_CHECKPOINT")

    def _end_by_rerun(self, fault: Fault, code: int, state: str) -> None:
        """All ranks of the cycle that runs end, one shortly after the other; the result of one was rejected."""
        own = self._launcher(fault)
        for each in self.job.launchers:
            if own is None or own.ranks is None or each.ranks is None or each.ranks.cycle != own.ranks.cycle:
                continue
            machine = RerunState(state=state, own=each is own)
            each.call(lambda each=each, machine=machine: each.reruns(fault, code, machine))

    def _launcher_killed(self, fault: Fault) -> None:
        launcher = self._launcher(fault)
        if launcher is not None:
            launcher.hurt(fault, FOR_GOOD_S)
            launcher.die()
            if fault.comes_back and self.may_come_back():
                self._again(launcher.host, fault, fault.seconds)

    def _dies_last(self, fault: Fault) -> None:
        """A launcher is killed whose rank still runs when others of the cycle have finished."""
        last = [each for each in self.job.launchers if each.is_alive and each.is_last]
        if last:
            launcher = last[fault.which % len(last)]
            launcher.hurt(fault, FOR_GOOD_S)
            launcher.die()
        elif not self.job.is_over():
            self.world.after(_LOOKS_AGAIN_S, lambda: self._dies_last(fault))

    def may_come_back(self) -> bool:
        """Where the number of launchers is known, none comes back."""
        return not self.job.rules.launchers

    def _host_off(self, fault: Fault) -> None:
        host = self._host(fault)
        if host.is_on:
            for launcher in self.job.launchers:
                if launcher.host is host and launcher.is_alive:
                    launcher.hurt(fault, FOR_GOOD_S)
            self.network = True
            host.power_off()
            if fault.comes_back and self.may_come_back():
                self.world.after(fault.seconds, host.power_on)
                self._again(host, fault, fault.seconds + 0.1)

    def _coordinator_killed(self, fault: Fault) -> None:
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.die()

    def _cut(self, pairs: set[tuple[int, int]], hosts: list[Host], fault: Fault) -> None:
        """Cut the way from the first to the second host of each pair."""
        self.network = True
        self._touch(hosts, fault, fault.seconds)
        parted_from: dict[int, set[int]] = {}
        for a, b in itertools.chain.from_iterable(itertools.permutations(pair) for pair in pairs):
            parted_from.setdefault(a, set()).add(b)  # no connection does without the other direction
        self.apart.append((fault, self.world.now_s, self.world.now_s + fault.seconds, parted_from))
        self.world.cut(pairs)
        self.world.after(fault.seconds, lambda: self.world.heal(pairs))

    def _host_cut(self, fault: Fault) -> None:
        host = self._host(fault)
        others = [other for other in self.world.hosts if other is not host]
        self._cut(_both_ways((host.number, other.number) for other in others), [host], fault)

    def _split(self, fault: Fault) -> None:
        chance = random.Random(fault.which)
        side = {host.number for host in self.world.hosts if chance.random() < 0.5}
        pairs = [
            (a.number, b.number)
            for a, b in itertools.combinations(self.world.hosts, 2)
            if (a.number in side) != (b.number in side)
        ]
        self._cut(_both_ways(pairs), self.world.hosts, fault)

    def _pair_cut(self, fault: Fault) -> None:
        chance = random.Random(fault.which)
        a, b = chance.sample(self.world.hosts, 2)
        self._cut(_both_ways([(a.number, b.number)]), [a, b], fault)

    def _one_way_cut(self, fault: Fault) -> None:
        """Nothing gets from one host to another one or to all others, or from all others to it."""
        chance = random.Random(fault.which)
        host = self._host(fault)
        others = [other for other in self.world.hosts if other is not host]
        if chance.random() < 0.3:
            others = [chance.choice(others)]
        ways = {(host.number, other.number) for other in others}
        if chance.random() < 0.5:
            ways = {(b, a) for a, b in ways}
        self._cut(ways, [host, *(others if len(others) == 1 else ())], fault)

    def _coordinator_frozen(self, fault: Fault) -> None:
        coordinator = self._coordinator()
        if coordinator is not None:
            self.network = True
            self._touch([coordinator.host], fault, fault.seconds)  # as long as nobody can tell which of the two it is
            coordinator.freeze(fault.seconds)

    def _host_frozen(self, fault: Fault) -> None:
        host = self._host(fault)
        self.network = True
        self._touch([host], fault, fault.seconds)
        host.freeze(fault.seconds)

    def _clock_jumps(self, fault: Fault) -> None:
        host = self._host(fault)
        host.jump(fault.seconds * 3)
        host.jumps.append(Hurt(fault, self.world.now_s, self.world.now_s))

    def _coordinator_dies_at_effect(self, fault: Fault) -> None:
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.dies_at_effect = fault.count * max(1, len(self.world.hosts) // 4)

    def _coordinator_dies_deciding(self, fault: Fault) -> None:
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.dies_deciding = fault.count

    def _node_stopped(self, fault: Fault) -> None:
        launcher = self._launcher(fault)
        if launcher is not None and fault.count % 3 == 0:
            launcher.call(lambda: launcher.abandoned(fault))
        elif launcher is not None:
            launcher.call(lambda: launcher.asked_to_stop(fault, well=fault.comes_back))

    def _all_stopped(self, fault: Fault) -> None:
        for launcher in self.job.launchers:
            if launcher.is_alive:
                delay_s = self.world.chance.uniform(0.0, 1.0)
                launcher.later(delay_s, lambda each=launcher: each.asked_to_stop(fault, well=True))

    def _newcomer(self, fault: Fault) -> None:
        host = Host(self.world, len(self.world.hosts))
        self.world.hosts.append(host)
        self.job.launch(host)

    def _node_ill(self, fault: Fault) -> None:
        launcher = self._launcher(fault)
        if launcher is not None:
            launcher.hurt(fault, fault.seconds + 3)
            launcher.is_ill = True

            def well() -> None:
                launcher.is_ill = False

            self.world.after(fault.seconds, well)
