"""What happens to a simulated job, drawn from a seed: how large it is, and which faults hit what and when."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from megatron_ft.job.rules.messages import Rules

_BY_WEIGHT = {
    6: "rank_fails",
    4: "launcher_killed coordinator_killed dies_at_effect coordinator_dies_at_effect",
    3: "host_off host_cut split coordinator_dies_deciding",
    2: "rank_hangs pair_cut launcher_frozen coordinator_frozen host_frozen connection_reset newcomer",
    1: "node_excluded node_stopped all_stopped shutdown_asked node_ill",
}
FAULTS = {kind: weight for weight, kinds in _BY_WEIGHT.items() for kind in kinds.split()}
"""What may happen, and how often beside the others."""
FAULTS_IN_ETCD = FAULTS | dict.fromkeys(("etcd_away", "etcd_cut", "answers_lost"), 4)
"""The same where the lock is in etcd: it answers nobody, one host doesn't reach it, or it does what it is asked for and
its answers are lost."""


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
class Hurt:
    """What a fault did to a launcher, its ranks, its host or its network, and from when to when."""

    fault: Fault
    from_s: float
    until_s: float
    cycle: int | None = None
    """The cycle whose ranks it hit; None if it hit something else."""


@dataclass(frozen=True)
class Plan:
    """One run: the faults, and everything else that isn't left to chance."""

    seed: int
    nodes: int
    spares: int
    rules: Rules
    work_s: float
    faults: tuple[Fault, ...]
    reports_silence: bool = False
    """Kernels end connections to hosts that answer no packet."""
    latency_s: float = 0.0
    """Of each packet, in one direction."""
    loss: float = 0.0
    """Probability that a packet is lost, and sent again later."""
    in_etcd: bool = False
    """The lock is in etcd."""
    had_former: bool = False
    """There are decisions of an earlier run of the same name in etcd, whose launchers are gone."""
    tells_progress: bool = False
    """Launchers count the steps of their ranks, which need all nodes of the cycle."""
    shares_network: bool = False
    """Ranks use the network of the launchers: where it is cut, they make no step."""
    makes_progress: bool = True
    """Each cycle gets further than the one before; else each gets to the same iteration."""


@dataclass(frozen=True)
class _Series:
    """Faults shortly after each other, in a job of few nodes that may restart often.

    Args:
        kinds: of the faults; one that is there twice comes twice as often.
        counts: of the faults.
        gaps_s: from one fault to the next.
        first: a fault of one of these kinds comes before them.
        which: half of the faults hit the one with this number, or all of them the same (-1).
        begins_s: bounds of the time from the earliest begin of a cycle to the first fault.
        rules, more: of the job and of its plan; a tuple is drawn from.
    """

    kinds: str
    counts: tuple[int, ...]
    gaps_s: tuple[float, ...]
    seconds: tuple[float, ...] = (0.3, 1.0, 5.0)
    first: str = ""
    nodes: tuple[int, ...] = (3, 4, 5, 6)
    which: int | None = None
    begins_s: tuple[float, float] = (1.0, 15.0)
    rules: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


_LATENCIES_S = (0.02, 0.08, 0.15)
_DIES = "coordinator_killed coordinator_dies_deciding coordinator_dies_at_effect"
_BACK = f"{_DIES} coordinator_killed newcomer rank_fails connection_reset launcher_killed"
_HOSTS = "host_off host_cut host_frozen coordinator_frozen"
_LEAVES = "node_stopped node_excluded shutdown_asked rank_fails coordinator_killed rank_hangs split pair_cut"
_FIRST = "node_excluded node_stopped host_cut host_off launcher_killed launcher_killed newcomer newcomer host_frozen"
_LAST = "launcher_frozen launcher_frozen host_cut launcher_killed newcomer connection_reset dies_last node_excluded"
_ETCD = "etcd_away etcd_cut answers_lost answers_lost host_off launcher_killed host_cut rank_fails node_stopped"
_SHORT, _LONG = (0.02, 0.1, 0.2, 0.3), (0.3, 2.0, 5.0, 8.0)
_SERIES = {
    "takeovers": _Series(f"{_BACK} {_HOSTS}", (2, 3, 4), (*_SHORT, 0.6, 1.0, 3.0), (0.3, 1.0, 4.9, 5.4, 8.0, 20.0)),
    "farewells": _Series(_LEAVES, (2, 3), (*_SHORT, 0.0, 0.6, 3.0), (0.3, 3.0, 8.0, 25.0)),
    "first host": _Series(f"{_FIRST} {_BACK}", (3, 4, 5), (*_SHORT, 1.0, 3.0), (0.2, 1.0, 5.2, 25.0), which=0),
    "shutdown": _Series(f"{_BACK} {_HOSTS}", (1, 2), _SHORT, (5.0, 8.0, 20.0), "shutdown_asked coordinator_killed"),
    "shutdown after a loss": _Series("shutdown_asked rank_fails", (1, 2), _SHORT, first=_DIES),
    "no progress": _Series(
        f"rank_fails rank_fails rank_fails rank_fails rank_fails {_DIES}",
        (5, 6, 7),
        (0.2, 3.0, 4.5, 6.0),
        nodes=(2, 3, 4),
        rules={"max_stalled": (2, 3), "min_healthy": False},
        more={"work_s": 30.0, "makes_progress": False},
    ),
    "the end": _Series(
        f"{_LAST} {_DIES} {_HOSTS}",
        (1, 2, 3),
        (*_SHORT, 1.0, 3.0),
        (0.3, 3.0, 8.0, 12.0, 25.0, 70.0),
        nodes=(2, 3, 4, 5),
        begins_s=(2.5, 5.0),
        rules={"last_call_s": 0.5},
        more={"work_s": 3.0},
    ),
    "lost peers": _Series(
        "connection_reset coordinator_killed rank_fails host_cut",
        (0, 0, 0, 1),
        _LONG,
        first="dies_last",
        begins_s=(1.0, 4.0),
        rules={"min_healthy": False},
    ),
    "one node again": _Series(
        "rank_fails",
        (2, 3),
        (4.0, 5.0, 6.0),
        nodes=(2, 3, 4),
        which=-1,
        begins_s=(3.0, 5.0),
        rules={"min_healthy": False, "at_once": False},
        more={"spares": (1, 2), "work_s": 30.0, "loss": 0.0},
    ),
    "cut off": _Series("host_cut host_cut split", (1, 2), _LONG, (45.0, 75.0), more={"work_s": 90.0}),
    "reruns": _Series(f"{_BACK} host_off", (0, 1), _SHORT, first="ranks_rerun ranks_rerun rerun_concluded"),
    "slow answers": _Series(
        "coordinator_killed", (1, 2, 3), _LONG, more={"loss": 0.3, "latency_s": _LATENCIES_S, "work_s": 30.0}
    ),
    "etcd": _Series(
        f"{_ETCD} {_DIES} {_HOSTS}",
        (2, 3, 4),
        (*_SHORT, 3.0, 9.0),
        (0.5, 5.0, 9.0, 12.0, 30.0),
        nodes=(2, 3, 4, 5),
        more={"in_etcd": True, "work_s": 20.0},
    ),
}
_DIRECTED = 0.5
"""Part of the plans whose faults are a series."""
_LARGE, _HUGE = 0.005, 0.0005
"""Part of the plans with 110 and with 500 nodes."""
_ONE_WAY = {"host_cut", "pair_cut"}


def plan_of(seed: int, *, nodes: int | None = None) -> Plan:
    """Draw a plan: faults that are independent of each other, or a series of faults that is hard to bear."""
    chance = random.Random(seed ^ 0x6E6574)
    plan = plain_plan_of(seed, nodes=nodes, in_etcd=chance.random() < 0.25)
    node_lost_s = chance.choice((5.0, 5.0, 15.0))
    plan = dataclasses.replace(
        plan,
        rules=replace(plan.rules, node_lost_s=node_lost_s),
        latency_s=chance.choice(_LATENCIES_S) if chance.random() < 0.25 else 0.0,
        loss=chance.choice((0.01, 0.05, 0.3 if plan.nodes <= 50 else 0.01)) if chance.random() < 0.25 else 0.0,
        makes_progress=chance.random() < 0.75,
        tells_progress=chance.random() < 0.5,
        shares_network=chance.random() < 0.7,
        had_former=plan.in_etcd and chance.random() < 0.1,
    )
    is_free = nodes is None and plan.nodes <= 50
    if is_free and chance.random() < _DIRECTED:
        plan = _drawn(plan, _SERIES[chance.choice(list(_SERIES))], chance)
    drawn = [
        dataclasses.replace(fault, kind="one_way_cut") if fault.kind in _ONE_WAY and chance.random() < 0.4 else fault
        for fault in plan.faults
    ]
    return dataclasses.replace(plan, faults=tuple(sorted(drawn, key=lambda fault: fault.at_s)))


def _drawn(plan: Plan, series: _Series, chance: random.Random) -> Plan:
    """Give a plan the faults of a series."""

    def of(values: Any) -> Any:
        return chance.choice(values) if isinstance(values, tuple) else values

    count = chance.choice(series.nodes)
    given = {"max_nodes": count, "max_restarts": 10, "max_stalled": 0, "launchers": 0, "join_timeout_s": 90.0}
    given["min_nodes"] = min(count, chance.choice((1, 2, 3, count)))
    given |= {name: of(value) for name, value in series.rules.items()}
    more = {name: of(value) for name, value in {"spares": (0, 1, 2), **series.more}.items()}
    plan = dataclasses.replace(plan, nodes=count, rules=replace(plan.rules, **given), **more)
    at_s = (plan.rules.last_call_s or 0.0) + min(chance.uniform(*series.begins_s), plan.work_s + 2.0)
    kinds = [chance.choice(series.first.split())] if series.first else []
    kinds += chance.choices(series.kinds.split(), k=chance.choice(series.counts))
    faults, same = [], chance.randrange(1 << 20)
    for kind in kinds:
        hit = same if series.which == -1 else series.which if chance.random() < 0.5 else None
        faults.append(_fault(chance, at_s, kind, seconds=chance.choice(series.seconds), which=hit))
        at_s += chance.choice(series.gaps_s)
    return dataclasses.replace(plan, faults=tuple(faults))


def _fault(chance: random.Random, at_s: float, kind: str, *, seconds: float, which: int | None = None) -> Fault:
    return Fault(
        at_s=at_s,
        kind=kind,
        which=chance.randrange(1 << 20) if which is None else which,
        seconds=seconds,
        count=chance.randrange(12),
        comes_back=chance.random() < 0.7,
    )


def plain_plan_of(seed: int, *, nodes: int | None = None, faults: int | None = None, in_etcd: bool = False) -> Plan:
    """Draw a plan whose network loses nothing, and delays little."""
    chance = random.Random(seed)
    count, size = min(50, 2 + int(chance.expovariate(1 / 6.0))), chance.random()
    count = nodes or (500 if size < _HUGE else 110 if size < _LARGE else count)
    spares = chance.choice((0, 0, 1, 2))
    rules = Rules(
        min_nodes=chance.choice((count, count, max(1, count - 1), max(1, count // 2), 1)),
        max_nodes=count,
        min_healthy=chance.random() < 0.25,
        max_restarts=chance.choice((0, 1, 3, 10)),
        max_stalled=chance.choice((0, 3)),
        at_once=chance.random() < 0.3,
        last_call_s=chance.choice((None, None, 0.5, 3.0)),
        join_timeout_s=90.0,
    )
    work_s, weights = chance.uniform(3.0, 15.0), FAULTS_IN_ETCD if in_etcd else FAULTS
    drawn = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6)) if faults is None else faults):
        (kind,) = chance.choices(list(weights), list(weights.values()))
        seconds = chance.choice((0.05, 0.5, 2.0, 5.0, 8.0, 12.0, 30.0)) * chance.uniform(0.8, 1.2)
        drawn.append(_fault(chance, chance.uniform(0.0, work_s + 4.0), kind, seconds=seconds))
    if chance.random() < 0.25 and count <= 50:
        known = count + spares + sum(fault.kind == "newcomer" for fault in drawn)  # who is slow to start
        rules = replace(rules, launchers=known, join_timeout_s=200.0)
    return Plan(
        seed=seed,
        nodes=count,
        spares=spares,
        rules=rules,
        work_s=work_s,
        faults=tuple(sorted(drawn, key=lambda fault: fault.at_s)),
        reports_silence=chance.random() < 0.5,
        in_etcd=in_etcd,
    )
