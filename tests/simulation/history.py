"""What happened in a run, as its checks ask for it: which cycles there were, and which faults may have ended each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ft.job.rules.decisions import DecisionKind
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
STOPS = {"node_stopped", "all_stopped"}
_FREEZES = {"launcher_frozen", "coordinator_frozen", "host_frozen"}
FOR_A_WHILE = {"host_cut", "split", "pair_cut", "one_way_cut", "packets_lost", *_FREEZES}
_HARDLY = {"clock_jumps", "newcomer", "node_ill", "keeper_replaced", "segment_rots"}
"""What can't end a cycle, nor hide what has ended it."""
_LATER = {
    "dies_at_effect",
    "dies_last",
    "coordinator_dies_at_effect",
    "coordinator_dies_deciding",
}
"""What strikes some time after it was drawn."""
_COST_A_RESTART = {
    *RANK_FAULTS,
    *STOPS,
    *_FREEZES,
    "launcher_killed",
    "host_off",
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
    return [first[number] for number in sorted(first) if first[number].decision.kind is DecisionKind.START]


def members(job: Job, cycle: Made) -> list[Launcher | None]:
    """The launchers of a cycle by place."""
    launchers = {launcher.instance: launcher for launcher in job.launchers}
    return [launchers.get(instance) for instance in cycle.members]


def strikes(trouble: Any, cycle: Made, until_s: float) -> list[Fault]:
    """Faults that can have to do with what happened to a cycle before ``until_s``."""
    struck = [(at_s, fault) for (at_s, _), fault in zip(trouble.hit, trouble.struck, strict=True)]
    lasted_s = {fault: fault.seconds if fault.kind in FOR_A_WHILE else 0.0 for _, fault in struck}
    lasted_s.update((fault, FOR_GOOD_S) for fault in lasted_s if fault.kind in _LATER)
    return [
        fault
        for at_s, fault in struck
        if at_s <= until_s and at_s + lasted_s[fault] >= cycle.at_s and fault.kind not in _HARDLY
    ]


def suspects(plan: Plan, job: Job, trouble: Any, cycle: Made, until_s: float) -> dict[Launcher, list[Hurt]]:
    """Launchers of a cycle that were hit, before ``until_s``, by what may end one at the cost of a restart."""
    is_alone = len(strikes(trouble, cycle, until_s)) == 1
    found = {}
    for launcher in members(job, cycle):
        if launcher is not None:
            hurts = cut_off(job, trouble, launcher, cycle.at_s, until_s)
            is_late = bool(hurts)
            hurts += [hurt for hurt in launcher.hurts if _may_end(plan, launcher, hurt, cycle, until_s, is_late)]
            if is_alone:
                hurts = [hurt for hurt in hurts if _is_felt(hurt)]
            found.update({launcher: hurts} if hurts else {})
    return found


def cut_off(job: Job, trouble: Any, launcher: Launcher, from_s: float, until_s: float) -> list[Hurt]:
    """What kept a launcher from reaching the endpoint's host between those times: the network, or that host.

    On the endpoint's host, what kept all others from it.
    """
    own = launcher.host.number
    apart = [
        Hurt(fault, begin_s, end_s)
        for fault, begin_s, end_s, parted_from in trouble.apart
        if own in parted_from and (own == 0 or 0 in parted_from[own])
    ]
    first = [hurt for each in job.launchers if each.host.number == 0 for hurt in each.hurts]
    frozen = [hurt for hurt in first if hurt.fault.kind == "host_frozen" and hurt.fault.seconds >= _LEAST_S]
    return [hurt for hurt in [*apart, *frozen] if hurt.from_s <= until_s and hurt.until_s >= from_s]


def _may_end(plan: Plan, launcher: Launcher, hurt: Hurt, cycle: Made, until_s: float, is_late: bool) -> bool:
    """``is_late``: the others may have noticed that ranks were gone before they heard why."""
    kind = hurt.fault.kind
    if hurt.from_s > until_s or hurt.until_s < cycle.at_s or hurt.cycle not in (None, cycle.decision.cycle):
        return False
    if kind == "dies_at_effect":
        return launcher.ended_s is not None and launcher.ended_s <= until_s
    if kind == "node_excluded":
        # too few may be good then, or the coordinator hears first of other nodes' ranks, which failed
        return plan.rules.min_healthy or is_late or _has_other_leader(launcher.job, cycle, until_s)
    return kind in _COST_A_RESTART


def _has_other_leader(job: Job, cycle: Made, until_s: float) -> bool:
    return any(process.name != cycle.by and cycle.at_s <= process.started_s <= until_s for process in job.coordinators)


def _is_felt(hurt: Hurt) -> bool:
    """Whether it is enough for a node to count as lost."""
    return hurt.fault.kind not in FOR_A_WHILE or hurt.fault.seconds >= _LEAST_S
