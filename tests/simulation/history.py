"""What happened in a run, as its checks ask for it: which cycles there were, and which faults may have ended each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ft.job.rules.decisions import DecisionKind
from megatron_ft.job.rules.etcd_keys import LEASE_S
from megatron_ft.job.rules.messages import Verdict
from tests.simulation.plan import Hurt
from tests.simulation.world import ETCD

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher, Made

RANK_FAULTS = {"rank_fails", "rank_hangs", "ranks_rerun", "rerun_concluded"}
STOPS = {"node_stopped", "all_stopped"}
_FREEZES = {"launcher_frozen", "coordinator_frozen", "host_frozen"}
FOR_A_WHILE = {"host_cut", "split", "pair_cut", "one_way_cut", "packets_lost", "etcd_cut", "etcd_away", *_FREEZES}
_HARDLY = {"newcomer", "node_ill", "answers_lost"}
"""What can't end a cycle, nor hide what has ended it."""
_LATER = {"dies_at_effect", "dies_last", "coordinator_dies_at_effect", "coordinator_dies_deciding"}
"""What strikes some time after it was drawn."""
_COST_A_RESTART = {*RANK_FAULTS, *STOPS, *_FREEZES, "launcher_killed", "host_off", "dies_at_effect", "dies_last"}
"""Beside cuts, which part a node from its coordinator."""
_LEAST_S = 4.0
"""A node that is silent for fewer seconds, counted from the fault, is never declared lost."""
_FOR_GOOD_S = 1e9


def cycles(job: Job) -> list[Made]:
    """Return the decisions that start a cycle, in order; each once, as it was made first."""
    first: dict[int, Made] = {}
    for made in job.made:
        first.setdefault(made.decision.number, made)
    return [first[number] for number in sorted(first) if first[number].decision.kind is DecisionKind.START]


def ends(job: Job) -> list[Made]:
    """Return the decisions that end the job, but for that of a job which never began."""
    return [made for made in job.made if made.decision.world and made.decision.kind is DecisionKind.END]


def members(job: Job, cycle: Made) -> list[Launcher | None]:
    """Return the launchers of a cycle by place."""
    launchers = {launcher.instance: launcher for launcher in job.launchers}
    return [launchers.get(instance) for instance in cycle.members]


def verdicts_on(job: Job, cycle: Made) -> list[Verdict]:
    """Return what leaders have found of a cycle."""
    return [judged.verdict for judged in job.verdicts if judged.verdict.cycle == cycle.decision.cycle]


def strikes(job: Job, cycle: Made, until_s: float) -> list[Hurt]:
    """Return the faults that can have to do with what happened to a cycle before ``until_s``."""
    found = []
    for hurt in job.struck:
        kind = hurt.fault.kind
        lasts_s = hurt.fault.seconds if kind in FOR_A_WHILE else _FOR_GOOD_S if kind in _LATER else 0.0
        if hurt.from_s <= until_s and hurt.from_s + lasts_s >= cycle.at_s and kind not in _HARDLY:
            found.append(hurt)
    return found


def suspects(job: Job, cycle: Made, until_s: float) -> dict[Launcher, list[Hurt]]:
    """Return the launchers of a cycle that were hit before ``until_s`` by what may end one at the cost of a restart."""
    is_alone = len(strikes(job, cycle, until_s)) == 1
    found = {}
    for launcher in members(job, cycle):
        if launcher is not None:
            hurts = cut_off(job, launcher, cycle.at_s, until_s)
            is_late = bool(hurts)
            hurts += [hurt for hurt in launcher.hurts if _may_end(launcher, hurt, cycle, until_s, is_late)]
            if is_alone:  # it is enough for a node to count as lost
                hurts = [h for h in hurts if h.fault.kind not in FOR_A_WHILE or h.fault.seconds >= _LEAST_S]
            found.update({launcher: hurts} if hurts else {})
    return found


def cut_off(job: Job, launcher: Launcher, from_s: float, until_s: float) -> list[Hurt]:
    """Return what kept a launcher from reaching the leader's host between those times: the network, or that host.

    On the leader's host, what kept all others from it.
    """
    own, hosts = launcher.host.number, {0}
    if job.plan.in_etcd:  # hosts of the leaders of that time, or where launchers look for them
        ended_s = {each: each.ended_s or _FOR_GOOD_S for each in job.coordinators}
        there = (c.host.number for c, s in ended_s.items() if c.started_s <= until_s and s + LEASE_S >= from_s)
        hosts = {ETCD, *there}
    found = [hurt for hurt, parted in job.apart if own in parted and (own in hosts or hosts & parted[own])]
    ended_s = [each.ended_s or _FOR_GOOD_S for each in job.coordinators]
    for hurt in [hurt for each in job.launchers if each.host.number in hosts for hurt in each.hurts]:
        # a leader goes on without its launcher, but isn't replaced
        is_held = hurt.fault.kind != "launcher_frozen" or any(hurt.from_s <= at_s <= hurt.until_s for at_s in ended_s)
        found += [hurt] if "frozen" in hurt.fault.kind and hurt.fault.seconds >= _LEAST_S and is_held else []
    return [hurt for hurt in found if hurt.from_s <= until_s and hurt.until_s >= from_s]


def is_innocent(launcher: Launcher, from_s: float, until_s: float, *, before_s: float = 0.0) -> bool:
    """Return True if no fault hit a launcher then, or shortly before, and it could reach the leader."""
    is_hit = any(hurt.until_s + before_s >= from_s and hurt.from_s <= until_s for hurt in launcher.hurts)
    return not is_hit and not cut_off(launcher.job, launcher, from_s, until_s)


def _may_end(launcher: Launcher, hurt: Hurt, cycle: Made, until_s: float, is_late: bool) -> bool:
    """``is_late``: the others may have noticed that ranks were gone before they heard why."""
    kind, job = hurt.fault.kind, launcher.job
    if hurt.from_s > until_s or hurt.until_s < cycle.at_s or hurt.cycle not in (None, cycle.decision.cycle):
        return False
    if kind == "dies_at_effect":
        return launcher.ended_s is not None and launcher.ended_s <= until_s
    if kind == "node_excluded":
        # too few may be good then, or the coordinator hears first of other nodes' ranks, which failed
        has_other = any(each.name != cycle.by and cycle.at_s <= each.started_s <= until_s for each in job.coordinators)
        return job.plan.rules.min_healthy or is_late or has_other
    return kind in _COST_A_RESTART
