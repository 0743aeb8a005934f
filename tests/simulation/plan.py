"""What happens to a simulated job, drawn from a seed: how large it is, and which faults hit what and when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from megatron_ft.core.job.messages import Rules

__all__ = ["FAULTS", "Fault", "Plan", "plan_of"]

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
    endpoints: int
    has_ranks: bool
    faults: tuple[Fault, ...]
    reports_silence: bool = False
    """Kernels end connections to hosts that answer no packet."""
    learns: bool = False
    """Ranks reach milestones, and their hangs are found by learned timeouts."""

    def without(self, index: int) -> Plan:
        """The same with one fault less."""
        return replace(self, faults=(*self.faults[:index], *self.faults[index + 1 :]))


def plan_of(seed: int, *, nodes: int | None = None, faults: int | None = None) -> Plan:
    """Draw one."""
    chance = random.Random(seed)
    count = min(50, 2 + int(chance.expovariate(1 / 6.0)))
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
    endpoints, has_ranks = chance.choice((1, 1, 2, 3)), chance.random() < 0.5
    reports_silence = chance.random() < 0.5
    if chance.random() < 0.25:
        known = count + spares + sum(fault.kind == "newcomer" for fault in drawn)  # who is slow to start
        rules = replace(rules, launchers=known, join_timeout_s=200.0)
    return Plan(
        seed=seed,
        nodes=count,
        spares=spares,
        rules=rules,
        work_s=work_s,
        endpoints=endpoints,
        has_ranks=has_ranks,
        faults=tuple(drawn),
        reports_silence=reports_silence,
        learns=chance.random() < 0.5,
    )
