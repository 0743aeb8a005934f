"""What happens to a simulated job, drawn from a seed: how large it is, and which faults hit what and when."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.job.rules.messages import Rules

__all__ = ["FAULTS", "Fault", "Plan", "plain_plan_of", "plan_of"]

FAULTS = {
    "rank_fails": 6,
    "rank_hangs": 2,
    "launcher_killed": 4,
    "host_off": 3,
    "coordinator_killed": 4,
    "host_cut": 3,
    "split": 3,
    "pair_cut": 2,
    "launcher_frozen": 2,
    "coordinator_frozen": 2,
    "host_frozen": 2,
    "clock_jumps": 1,
    "connection_reset": 2,
    "dies_at_effect": 4,
    "coordinator_dies_at_effect": 4,
    "coordinator_dies_deciding": 3,
    "node_excluded": 1,
    "node_stopped": 1,
    "all_stopped": 1,
    "shutdown_asked": 1,
    "newcomer": 2,
    "node_ill": 1,
}
"""What may happen, and how often beside the others."""


@dataclass(frozen=True)
class Fault:
    """``which`` picks whom it hits, ``seconds`` is how long it lasts, ``count`` is of effects."""

    at_s: float
    kind: str
    which: int
    seconds: float
    count: int = 0
    comes_back: bool = False


@dataclass(frozen=True)
class Plan:
    """One run: the faults, and everything else that isn't left to chance."""

    seed: int
    nodes: int
    spares: int
    rules: Rules
    work_s: float
    has_ranks: bool
    faults: tuple[Fault, ...]
    reports_silence: bool = False
    """Kernels end connections to hosts that answer no packet."""
    learns: bool = False
    """Ranks reach milestones, and their hangs are found by learned timeouts."""
    latency_s: float = 0.0
    """Of each packet, in one direction."""
    loss: float = 0.0
    """Probability that a packet is lost, and sent again later."""
    tells_progress: bool = False
    """Launchers count the steps of their ranks, which need all nodes of the cycle."""
    shares_network: bool = False
    """Ranks use the network of the launchers: where it is cut, they make no step."""
    makes_progress: bool = True
    """Each cycle gets further than the one before; else each gets to the same iteration."""
    snapshots_s: float = 0.0
    """Seconds from one memory checkpoint to the next; 0: there are none."""
    copies: bool = False
    """Nodes keep copies of each other's snapshots."""
    poisons: bool = False
    """Ranks fail soon after they have restored the first snapshot that any cycle restores."""

    def without(self, index: int) -> Plan:
        """The same with one fault less."""
        return dataclasses.replace(self, faults=(*self.faults[:index], *self.faults[index + 1 :]))


_LATENCIES_S = (0.02, 0.08, 0.15)
_LOSSES = (0.01, 0.05, 0.3)
_ONE_WAY = {"host_cut", "pair_cut"}
_RARE = 0.25
_LARGE, _HUGE = 0.005, 0.0005
"""Part of the plans with 110 and with 500 nodes."""
_LOST_PEERS = 0.1
_AGAIN = 0.04
_WITH_SNAPSHOTS = 0.3
_DIRECTED = 0.4
"""Part of the plans whose faults are not independent of each other."""


def plan_of(seed: int, *, nodes: int | None = None, faults: int | None = None) -> Plan:
    """Draw one: faults that are independent of each other, or a series of faults that is known to be hard to bear."""
    plan = plain_plan_of(seed, nodes=nodes, faults=faults)
    chance = random.Random(seed ^ 0x6E6574)
    latency_s = chance.choice(_LATENCIES_S) if chance.random() < 0.25 else 0.0
    loss = chance.choice(_LOSSES) if chance.random() < 0.25 else 0.0
    plan = dataclasses.replace(plan, latency_s=latency_s, loss=loss, makes_progress=chance.random() < 0.75)
    steps = random.Random(seed ^ 0x73746570)
    node_lost_s = steps.choice((5.0, 5.0, 15.0))
    plan = dataclasses.replace(
        plan,
        rules=replace(plan.rules, node_lost_s=node_lost_s),
        tells_progress=steps.random() < 0.5,
        shares_network=steps.random() < 0.7,
    )
    if nodes is None and faults is None and chance.random() < _DIRECTED:
        rare = random.Random(seed ^ 0x726172D6)
        plan = rare.choice(_RARE_SERIES)(plan, rare) if rare.random() < _RARE else chance.choice(_SERIES)(plan, chance)
        late = random.Random(seed ^ 0x70656572)
        plan = _lost_peers(plan, late) if late.random() < _LOST_PEERS else plan
        again = random.Random(seed ^ 0x616761696E)
        plan = _again(plan, again) if again.random() < _AGAIN else plan
    drawn = [
        dataclasses.replace(fault, kind="one_way_cut") if fault.kind in _ONE_WAY and chance.random() < 0.4 else fault
        for fault in plan.faults
    ]
    plan = dataclasses.replace(plan, faults=tuple(sorted(drawn, key=lambda fault: fault.at_s)))
    return _with_snapshots(plan) if nodes is None and faults is None else plan


def _with_snapshots(plan: Plan) -> Plan:
    """Save memory checkpoints in some jobs: ranks fail, keepers too, and some snapshots hold what makes ranks fail."""
    chance = random.Random(plan.seed ^ 0x6D656D)
    if chance.random() >= _WITH_SNAPSHOTS:
        return plan
    faults = list(plan.faults)
    begins_s = 3.0 + (plan.rules.last_call_s or 0.0)
    of_copies = random.Random(plan.seed ^ 0x636F70)
    copies = of_copies.random() < 0.6
    for _ in range(of_copies.choice((0, 1, 1, 2)) if copies else 0):
        at_s, kind = begins_s + of_copies.uniform(0.0, plan.work_s), of_copies.choice(("host_off", "launcher_killed"))
        faults.append(_fault(of_copies, at_s, kind, seconds=1.0))
    for _ in range(chance.choice((1, 2, 2, 3))):
        kind = "rank_fails" if chance.random() < 0.8 else "coordinator_killed"
        faults.append(_fault(chance, begins_s + chance.uniform(0.0, plan.work_s), kind, seconds=1.0))
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        kind = chance.choice(("keeper_replaced", "segment_rots"))
        faults.append(_fault(chance, begins_s + chance.uniform(0.0, plan.work_s), kind, seconds=1.0))
    return dataclasses.replace(
        plan,
        rules=replace(plan.rules, max_restarts=10),
        work_s=plan.work_s + 5.0,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        snapshots_s=chance.choice((0.3, 0.6, 1.2)),
        copies=copies,
        poisons=chance.random() < 0.3,
    )


def _fault(chance: random.Random, at_s: float, kind: str, *, seconds: float, which: int | None = None) -> Fault:
    return Fault(
        at_s=at_s,
        kind=kind,
        which=chance.randrange(1 << 20) if which is None else which,
        seconds=seconds,
        count=chance.randrange(12),
        comes_back=chance.random() < 0.7,
    )


def _few(plan: Plan, chance: random.Random, nodes: Sequence[int], min_nodes: Sequence[int]) -> Plan:
    """A small job that may restart often: few nodes fail in many ways."""
    count = chance.choice(nodes)
    rules = replace(
        plan.rules,
        min_nodes=min(count, chance.choice((*min_nodes, count))),
        max_nodes=count,
        max_restarts=10,
        max_stalled=0,
        launchers=0,
        join_timeout_s=90.0,
    )
    return dataclasses.replace(plan, nodes=count, spares=chance.choice((0, 1, 2)), rules=rules)


def _takeovers(plan: Plan, chance: random.Random) -> Plan:
    """Leaders die shortly after each other, while launchers come, go and lose their connections."""
    plan, at_s, faults = _few(plan, chance, (3, 4, 5, 6), (1, 2, 3)), chance.uniform(1.0, plan.work_s), []
    kinds = ["coordinator_killed", "coordinator_killed", "coordinator_dies_deciding", "coordinator_dies_at_effect"]
    kinds += ["newcomer", "rank_fails", "connection_reset", "launcher_killed"]
    for _ in range(chance.choice((2, 3, 4))):
        faults.append(_fault(chance, at_s, chance.choice(kinds), seconds=chance.choice((0.3, 1.0, 5.0))))
        at_s += chance.choice((0.02, 0.1, 0.3, 0.6, 1.0))
    if chance.random() < 0.5:
        at_s += chance.choice((0.0, 0.3, 3.0, 6.0))
        kind = chance.choice(("host_off", "host_cut", "host_frozen", "coordinator_frozen"))
        seconds = chance.choice((4.9, 5.4, 6.0, 8.0, 20.0, 21.0))
        faults.append(_fault(chance, at_s, kind, seconds=seconds, which=chance.choice((0, None))))
    return dataclasses.replace(plan, faults=tuple(faults))


def _farewells(plan: Plan, chance: random.Random) -> Plan:
    """Nodes are stopped, excluded and lost at nearly the same moment, or a rank asks for the end of the job."""
    plan, at_s, faults = _few(plan, chance, (3, 4, 5, 6), (1, 2, 3)), chance.uniform(1.0, plan.work_s), []
    kinds = ("node_stopped", "node_excluded", "shutdown_asked", "rank_fails", "coordinator_killed", "rank_hangs")
    for _ in range(chance.choice((2, 3))):
        kind = chance.choice((*kinds, "split", "pair_cut"))
        faults.append(_fault(chance, at_s, kind, seconds=chance.choice((0.3, 3.0, 8.0, 25.0))))
        at_s += chance.choice((0.0, 0.02, 0.1, 0.3, 0.6, 3.0))
    return dataclasses.replace(plan, faults=tuple(faults))


def _first_host(plan: Plan, chance: random.Random) -> Plan:
    """Faults hit the first host of a job of few nodes, some of them while it is coming back."""
    plan, at_s, faults = _few(plan, chance, (2, 3, 4), (1, 1, 2)), chance.uniform(0.5, plan.work_s), []
    kinds = ["node_excluded", "node_stopped", "host_cut", "host_off", "launcher_killed", "launcher_killed"]
    kinds += ["coordinator_killed", "newcomer", "newcomer", "rank_fails", "connection_reset"]
    for _ in range(chance.choice((3, 4, 5))):
        kind = chance.choice((*kinds, "coordinator_dies_deciding", "host_frozen"))
        seconds = chance.choice((0.2, 0.6, 1.0, 3.0, 5.2, 8.0, 25.0))
        faults.append(_fault(chance, at_s, kind, seconds=seconds, which=chance.choice((0, None))))
        at_s += chance.choice((0.0, 0.05, 0.3, 1.0, 3.0, 6.0))
    return dataclasses.replace(plan, faults=tuple(faults))


def _shutdown(plan: Plan, chance: random.Random) -> Plan:
    """A rank asks for the end of the job, and the coordinator is lost before or after it has acted on it."""
    plan, at_s = _few(plan, chance, (2, 3, 4, 5), (1, 2, 3)), chance.uniform(1.0, plan.work_s)
    lost = ("coordinator_killed", "coordinator_killed", "coordinator_dies_at_effect", "coordinator_frozen", "host_off")
    faults = [_fault(chance, at_s, chance.choice(lost), seconds=chance.choice((6.0, 8.0, 20.0)))]
    faults.append(_fault(chance, at_s + chance.uniform(-0.3, 0.3), "shutdown_asked", seconds=1.0))
    if chance.random() < 0.5:
        kind = chance.choice(("rank_fails", "rank_fails", "newcomer", "connection_reset", "coordinator_killed"))
        asked_s = faults[-1].at_s
        faults.append(_fault(chance, asked_s - chance.choice((0.02, 0.2, 0.5)) * chance.random(), kind, seconds=5.0))
    return dataclasses.replace(plan, faults=tuple(faults))


def _stalls(plan: Plan, chance: random.Random) -> Plan:
    """Ranks fail again and again at the same iteration, under coordinators that die."""
    plan = _few(plan, chance, (2, 3, 4), (1, 2))
    at_s, faults = chance.uniform(1.0, 3.0), []
    for _ in range(chance.choice((3, 4, 5))):
        faults.append(_fault(chance, at_s, "rank_fails", seconds=1.0))
        if chance.random() < 0.4:
            kind = chance.choice(("coordinator_killed", "coordinator_dies_at_effect", "coordinator_dies_deciding"))
            faults.append(_fault(chance, at_s + chance.uniform(-0.2, 1.5), kind, seconds=1.0))
        at_s += chance.uniform(3.0, 6.0)
    rules = replace(plan.rules, max_stalled=chance.choice((2, 3)))
    return dataclasses.replace(plan, rules=rules, work_s=30.0, makes_progress=False, faults=tuple(faults))


def _slow_answers(plan: Plan, chance: random.Random) -> Plan:
    """Coordinators are replaced where packets are lost: answers come after launchers have given up waiting for them."""
    plan, at_s, faults = _few(plan, chance, (3, 4, 5, 6), (1, 2, 3)), chance.uniform(1.0, plan.work_s), []
    for _ in range(chance.choice((1, 2, 3))):
        faults.append(_fault(chance, at_s, "coordinator_killed", seconds=1.0))
        at_s += chance.uniform(0.3, 8.0)
    return dataclasses.replace(plan, loss=0.3, latency_s=chance.choice(_LATENCIES_S), work_s=30.0, faults=tuple(faults))


def _stalled_rank(plan: Plan, chance: random.Random) -> Plan:
    """A rank hangs in a job whose nodes go on without it: those that wait for it must live."""
    plan = _few(plan, chance, (3, 4, 5, 6), (1, 2))
    rules = replace(plan.rules, min_healthy=True, min_nodes=max(1, plan.nodes - chance.choice((1, 2))))
    at_s = chance.uniform(4.0, 10.0) + (rules.last_call_s or 0.0)
    faults = [_fault(chance, at_s, "rank_stalls", seconds=1.0)]
    if chance.random() < 0.3:
        kind = chance.choice(("coordinator_killed", "launcher_killed", "connection_reset", "rank_fails", "host_off"))
        faults.append(_fault(chance, at_s + chance.uniform(-1.0, 4.0), kind, seconds=1.0))
    return dataclasses.replace(plan, rules=rules, work_s=60.0, learns=False, faults=tuple(faults))


def _lost_peers(plan: Plan, chance: random.Random) -> Plan:
    """Ranks fail because they have lost another one, or waited too long for it: which one, only the others show."""
    plan = _few(plan, chance, (3, 4, 5, 6, 8), (1, 2, 3))
    rules = replace(plan.rules, min_healthy=False)
    kind = chance.choice(("dies_last", "dies_last", "rank_blocks"))
    at_s = chance.uniform(1.0, 4.0) + (rules.last_call_s or 0.0)
    faults = [_fault(chance, at_s, kind, seconds=1.0)]
    if chance.random() < 0.2:
        kind = chance.choice(("connection_reset", "coordinator_killed", "rank_fails", "host_cut"))
        faults.append(_fault(chance, at_s + chance.uniform(-0.5, 3.0), kind, seconds=chance.choice((0.3, 8.0))))
    return dataclasses.replace(plan, rules=rules, faults=tuple(faults))


def _again(plan: Plan, chance: random.Random) -> Plan:
    """The rank of one node fails again and again, while another node stands by."""
    plan = _few(plan, chance, (2, 3, 4), (1, 2))
    at_s, faults, which = chance.uniform(3.0, 5.0) + (plan.rules.last_call_s or 0.0), [], chance.randrange(1 << 20)
    for _ in range(chance.choice((2, 3))):
        faults.append(_fault(chance, at_s, "rank_fails", seconds=1.0, which=which))
        at_s += chance.uniform(4.0, 6.0)
    rules = replace(plan.rules, min_healthy=False, at_once=False)
    return dataclasses.replace(
        plan, spares=chance.choice((1, 2)), rules=rules, work_s=30.0, loss=0.0, faults=tuple(faults)
    )


_SERIES = (
    _takeovers,
    _farewells,
    _first_host,
    _shutdown,
    _stalls,
)
_RARE_SERIES = (_slow_answers, _stalled_rank)
"""Series that came later: drawn by another source, so that most seeds are the same runs as before."""


def plain_plan_of(seed: int, *, nodes: int | None = None, faults: int | None = None) -> Plan:
    """Draw one whose network loses nothing, and delays little."""
    chance = random.Random(seed)
    count = min(50, 2 + int(chance.expovariate(1 / 6.0)))
    large = random.Random(seed ^ 0x6C617267).random()
    count = 500 if large < _HUGE else 110 if large < _LARGE else count
    count = nodes or count
    spares = chance.choice((0, 0, 1, 2))
    min_nodes = chance.choice((count, count, max(1, count - 1), max(1, count // 2), 1))
    rules = Rules(
        min_nodes=min_nodes,
        max_nodes=count,
        min_healthy=chance.random() < 0.25,
        max_restarts=chance.choice((0, 1, 3, 10)),
        max_stalled=chance.choice((0, 3)),
        at_once=chance.random() < 0.3,
        last_call_s=chance.choice((None, None, 0.5, 3.0)),
        join_timeout_s=90.0,
    )
    work_s = chance.uniform(3.0, 15.0)
    drawn = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6)) if faults is None else faults):
        (kind,) = chance.choices(list(FAULTS), list(FAULTS.values()))
        drawn.append(
            Fault(
                at_s=chance.uniform(0.0, work_s + 4.0),
                kind=kind,
                which=chance.randrange(1 << 20),
                seconds=chance.choice((0.05, 0.5, 2.0, 5.0, 8.0, 12.0, 30.0)) * chance.uniform(0.8, 1.2),
                count=chance.randrange(12),
                comes_back=chance.random() < 0.6,
            )
        )
    drawn.sort(key=lambda fault: fault.at_s)
    has_ranks = chance.random() < 0.5
    reports_silence = chance.random() < 0.5
    if chance.random() < 0.25 and count <= 50:
        known = count + spares + sum(fault.kind == "newcomer" for fault in drawn)  # who is slow to start
        rules = replace(rules, launchers=known, join_timeout_s=200.0)
    return Plan(
        seed=seed,
        nodes=count,
        spares=spares,
        rules=rules,
        work_s=work_s,
        has_ranks=has_ranks,
        faults=tuple(drawn),
        reports_silence=reports_silence,
        learns=chance.random() < 0.5,
    )
