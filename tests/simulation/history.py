"""What happened in a run, as its checks ask for it: which cycles there were, and which faults may have ended each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_ft.core.job.decisions import DecisionKind
from tests.simulation.job import FOR_GOOD_S, Hurt

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher, Made
    from tests.simulation.plan import Fault, Plan

__all__ = ["FOR_A_WHILE", "RANK_FAULTS", "STOPS", "cut_off", "cycles", "members", "strikes", "suspects"]

RANK_FAULTS = {
    "rank_fails",
    "rank_unrestored",
    "rank_hangs",
    "rank_stalls",
    "rank_blocks",
    "ranks_rerun",
    "rerun_concluded",
}
STOPS = {"node_stopped", "all_stopped", "owner_stopped"}
_FREEZES = {"launcher_frozen", "coordinator_frozen", "host_frozen"}
FOR_A_WHILE = {"host_cut", "split", "pair_cut", "one_way_cut", "packets_lost", *_FREEZES}
_HARDLY = {"clock_jumps", "newcomer", "node_ill", "keeper_replaced", "segment_rots"}
"""What can't end a cycle, nor hide what has ended it."""
_LATER = {
    "dies_at_effect",
    "dies_last",
    "coordinator_dies_at_effect",
    "coordinator_dies_deciding",
    "successor_off_deciding",
}
"""What strikes some time after it was drawn."""
_COST_A_RESTART = {
    *RANK_FAULTS,
    *STOPS,
    *_FREEZES,
    "launcher_killed",
    "owner_killed",
    "host_off",
    "successor_off_deciding",
    "dies_at_effect",
    "dies_last",
}
"""Beside cuts, which part a node from its coordinator."""
_LEAST_S = 4.0
"""A node that is silent for fewer seconds, counted from the fault, is never declared lost."""


def cycles(job: Job) -> list[Made]:
    """Their decisions, in order; each once, as it was made first."""
    first: dict[int, Made] = {}
    for made in job.made:
        first.setdefault(made.decision.number, made)
    return [first[number] for number in sorted(first) if first[number].decision.kind is DecisionKind.CYCLE]


def members(job: Job, cycle: Made) -> list[Launcher | None]:
    """The launchers of a cycle by place; None where it isn't known who had that place."""
    launchers = {launcher.instance: launcher for launcher in job.launchers}
    value = cycle.decision.value
    named = cycle.decision.voters or [job.asked.get((value, place), each) for place, each in enumerate(cycle.members)]
    return [launchers.get(instance) for instance in named]


def _since_s(cycle: Made) -> float:
    """From when on a fault may end it: any time where another coordinator had proposed it, before it was lost."""
    return cycle.at_s if cycle.by == cycle.decision.value[1] else 0.0


def strikes(trouble: Any, cycle: Made, until_s: float) -> list[Fault]:
    """Faults that can have to do with what happened to a cycle before ``until_s``."""
    struck = [(at_s, fault) for (at_s, _), fault in zip(trouble.hit, trouble.struck, strict=True)]
    lasted_s = {fault: fault.seconds if fault.kind in FOR_A_WHILE else 0.0 for _, fault in struck}
    lasted_s.update((fault, FOR_GOOD_S) for fault in lasted_s if fault.kind in _LATER)
    return [
        fault
        for at_s, fault in struck
        if at_s <= until_s and at_s + lasted_s[fault] >= _since_s(cycle) and fault.kind not in _HARDLY
    ]


def suspects(
    plan: Plan, job: Job, trouble: Any, cycle: Made, until_s: float, by: set[str]
) -> dict[Launcher, list[Hurt]]:
    """Launchers of a cycle that were hit, before ``until_s``, by what may end one at the cost of a restart.

    ``by``: the coordinators that may have found that out, and the one that began the cycle. Where one of them, or the
    network to it, stood still for long, both ends are without the other: either may be named.
    """
    is_alone = len(strikes(trouble, cycle, until_s)) == 1
    found = {}
    for launcher in members(job, cycle):
        if launcher is not None:
            hurts = cut_off(job, trouble, launcher, _since_s(cycle), until_s, by)
            is_late = bool(hurts)
            hurts += [hurt for hurt in launcher.hurts if _may_end(plan, launcher, hurt, cycle, until_s, by, is_late)]
            if is_alone:
                hurts = [hurt for hurt in hurts if _is_felt(hurt)]
            found.update({launcher: hurts} if hurts else {})
    return found


def cut_off(job: Job, trouble: Any, launcher: Launcher, from_s: float, until_s: float, by: Iterable[str]) -> list[Hurt]:
    """What kept a launcher from reaching one of these coordinators between those times: the network, or their hosts.

    Or the others from reaching the coordinator beside it: then its host is what they find silent.
    """
    own, hosts = launcher.host.number, {process.host.number for process in job.coordinators if process.name in by}
    apart = [
        Hurt(fault, begin_s, end_s)
        for fault, begin_s, end_s, parted_from in trouble.apart
        if own in parted_from and (own in hosts or parted_from[own] & hosts)
    ]
    return [hurt for hurt in [*apart, *_frozen(job, hosts)] if hurt.from_s <= until_s and hurt.until_s >= from_s]


def _frozen(job: Job, hosts: set[int]) -> list[Hurt]:
    """When these hosts stood still, for long enough that launchers look for another coordinator."""
    here = [hurt for launcher in job.launchers if launcher.host.number in hosts for hurt in launcher.hurts]
    return [hurt for hurt in here if hurt.fault.kind == "host_frozen" and hurt.fault.seconds >= _LEAST_S]


def _may_end(
    plan: Plan, launcher: Launcher, hurt: Hurt, cycle: Made, until_s: float, by: set[str], is_late: bool
) -> bool:
    """``is_late``: the others may have noticed that ranks were gone before they heard why."""
    kind = hurt.fault.kind
    if hurt.from_s > until_s or hurt.until_s < _since_s(cycle) or hurt.cycle not in (None, cycle.decision.cycle):
        return False
    if kind == "dies_at_effect":
        return launcher.ended_s is not None and launcher.ended_s <= until_s
    if kind == "node_excluded":
        # too few may be good then, or the coordinator hears first of other nodes' ranks, which failed
        return plan.rules.min_healthy or len(by) > 1 or is_late
    return kind in _COST_A_RESTART


def _is_felt(hurt: Hurt) -> bool:
    """Whether it is enough for a node to count as lost."""
    return hurt.fault.kind not in FOR_A_WHILE or hurt.fault.seconds >= _LEAST_S
