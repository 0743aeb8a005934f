"""What the rules of a job say of its cycles: how many nodes take part, why a cycle ends, and what ends the job."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.core.rerun import WANTS_ANOTHER_GPU, Rerun
from megatron_ft.job.rules.messages import Verdict
from megatron_ft.job.rules.restart_policy import Action, Outcome
from tests.simulation.history import STOPS, cut_off, cycles, members

if TYPE_CHECKING:
    from tests.simulation.job import Hurt, Job, Judged, Launcher, Made
    from tests.simulation.plan import Plan

__all__ = [
    "ends_for_a_reason",
    "has_its_size",
    "meets_at_its_store",
    "notices_no_progress",
    "prefers_good_nodes",
    "reruns_elsewhere",
    "shuts_down",
    "spares_who_waits",
]

_STALL_S = 12.0
"""A rank that keeps others waiting is ended within this time: evidence is collected twice, and the grace is over."""
_ALONE_S = 3.0
"""Within this time of what has ended a cycle nothing else happens that ends the job."""
_TOO_OFTEN = 2
_BY_RANK = (CauseKind.CRASH, CauseKind.HANG, CauseKind.SIGNAL)
_IN_FLIGHT_S = 2.0
"""A cycle may begin for so long after the end of the job was asked for: its nodes are being asked."""


def spares_who_waits(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require, where nodes go on without a rank that hangs, that this rank is ended, and none that waits for it.

    Where something else happens, too, evidence may be missing, and who can't be told from a hung rank is ended.
    """
    if {fault.kind for fault in trouble.struck} != {"rank_stalls"} or len(trouble.struck) > 1 or plan.loss:
        return
    yield from job.wronged
    for launcher in job.launchers:
        for hurt in launcher.hurts:
            ran = [each for each in job.trained if each.launcher is launcher and each.cycle == hurt.cycle]
            if any((each.to_s or job.world.now_s) > hurt.from_s + _STALL_S for each in ran):
                yield f"{launcher.name} keeps the others waiting for more than {_STALL_S:g} s"


def has_its_size(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require MIN to MAX nodes in each cycle."""
    for cycle in cycles(job):
        if not plan.rules.min_nodes <= cycle.decision.world <= plan.rules.max_nodes:
            yield f"cycle {cycle.decision.cycle} has {cycle.decision.world} nodes"
        if len(set(filter(None, cycle.members))) != len([*filter(None, cycle.members)]):
            yield f"a node has two places in cycle {cycle.decision.cycle}"


def meets_at_its_store(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require that the ranks of a cycle meet at the store that its first node has opened since the cycle before."""
    used: dict[str, str] = {}
    for trained in job.trained:
        held = trained.held
        if held is None:
            continue
        first = next((made.members[0] for made in cycles(job) if made.decision.id == held.decision.id), None)
        opened_by = job.stores.get(held.store)
        if used.setdefault(held.store, held.decision.id) != held.decision.id or first not in (None, opened_by):
            yield f"{trained.launcher.name} starts ranks of cycle {trained.cycle} with the store {held.store!r}"


def ends_for_a_reason(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require a reason for each end of a cycle that isn't a failure."""
    begun = {made.decision.cycle: made for made in cycles(job)}
    for judged in job.verdicts:
        cycle = begun.get(judged.verdict.cycle)
        if cycle is None:
            continue
        match judged.verdict.outcome:
            case Outcome.MEMBERSHIP if not _may_change(plan, job, trouble, cycle, judged):
                yield f"cycle {judged.verdict.cycle} ended for other nodes: {judged.verdict.cause.text}"
            case Outcome.STOPPED if not _asked(job, judged.at_s) and not _is_holder_stopped(job, judged.at_s):
                yield f"cycle {judged.verdict.cycle} was stopped, and no rank had asked for that"
            case Outcome.MEMBERSHIP if _ends_after_all(job, trouble, judged):
                yield f"cycle {judged.verdict.cycle} was to be restarted without {judged.verdict.cause.host}"
            case Outcome.SUCCEEDED if still := _still_running(plan, job, cycle, judged):
                yield f"cycle {judged.verdict.cycle} has succeeded, and {still} trains"


def _may_change(plan: Plan, job: Job, trouble: Any, cycle: Made, judged: Judged) -> bool:
    """Return True if a node of the cycle had been excluded, or one may join at once."""
    launchers = [launcher for launcher in members(job, cycle) if launcher is not None]
    if any(h.fault.kind == "node_excluded" and h.from_s <= judged.at_s for each in launchers for h in each.hurts):
        return True
    if len(launchers) < cycle.decision.world:
        return True
    others = [each for each in job.launchers if each not in launchers and each.started_s <= judged.at_s]
    waits = any(each.ended_s is None or each.ended_s >= cycle.at_s for each in others)
    is_full = cycle.decision.world >= plan.rules.max_nodes
    was_lost = trouble.network or any(each.hurts for each in launchers)  # and joins again
    return plan.rules.at_once and (was_lost or (waits and not is_full))


def _ends_after_all(job: Job, trouble: Any, judged: Judged) -> bool:
    """Return True if the job ends as one that can't continue, though it was to, and nothing else has happened."""
    follows = [made.decision for made in job.made if made.at_s >= judged.at_s]
    if judged.verdict.decision.action is not Action.RESTART or not follows:
        return False
    near = [at_s for at_s, _ in trouble.hit if abs(at_s - judged.at_s) < _ALONE_S]
    return len(near) == 1 and judged.verdict.node is not None and follows[0].code == 1


def _asked(job: Job, until_s: float) -> list[tuple[Launcher, Hurt]]:
    asked = [(each, hurt) for each in job.launchers for hurt in each.hurts if hurt.fault.kind == "shutdown_asked"]
    return [(each, hurt) for each, hurt in asked if hurt.from_s <= until_s]


def _is_holder_stopped(job: Job, until_s: float) -> bool:
    holders = [each for each in job.launchers if each.member.owns]
    return any(hurt.fault.kind in STOPS and hurt.from_s <= until_s for each in holders for hurt in each.hurts)


def _still_running(plan: Plan, job: Job, cycle: Made, judged: Judged) -> str:
    if plan.rules.min_healthy:
        return ""
    ran = [each for each in job.trained if each.cycle == cycle.decision.cycle]
    still = [each.launcher.name for each in ran if each.to_s is None or each.to_s > judged.at_s]
    return ", ".join(still)


def shuts_down(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require that no cycle begins after a rank has asked for the end of the job, if its launcher is there to say so.

    Nor does the one in which it has asked succeed: its node says that it has finished later than what it has asked for.
    """
    yield from sorted({f"{each}, and had been asked for the end of the job" for each in job.heedless})
    for launcher, asked in _asked(job, job.world.now_s):
        for judged in job.verdicts:
            is_success = judged.verdict.cycle == asked.cycle and judged.verdict.outcome is Outcome.SUCCEEDED
            if is_success and not plan.rules.min_healthy and not _is_hurt(job, trouble, launcher, asked, judged.at_s):
                yield f"cycle {asked.cycle} succeeds, and {launcher.name} has asked for the end of the job"
        for made in cycles(job):
            if made.decision.cycle <= (asked.cycle or 0) or launcher.instance not in made.members:
                continue
            was_hurt = _is_hurt(job, trouble, launcher, asked, made.at_s)
            if made.at_s > asked.from_s + _IN_FLIGHT_S and not was_hurt:
                yield f"cycle {made.decision.cycle} begins after {launcher.name} has asked for the end of the job"


def _is_hurt(job: Job, trouble: Any, launcher: Launcher, asked: Hurt, until_s: float) -> bool:
    """Return True if something else hit a launcher after a rank of it had asked for the end of the job."""
    others = [each for each in launcher.hurts if each.fault.kind != "shutdown_asked"]
    was_hurt = any(each.from_s <= until_s and each.until_s >= asked.from_s - 2.0 for each in others)
    return was_hurt or bool(cut_off(job, trouble, launcher, asked.from_s - 2.0, until_s))


def notices_no_progress(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require that failed cycles which get no further are counted, by all coordinators together, and end the job.

    After one that has restored a snapshot from memory, which may be to blame, the file has its chance first.
    """
    for before, after in itertools.pairwise(cycles(job)):
        was, now = before.decision.advance, after.decision.advance
        # a cycle that ended for a node that came hasn't failed
        is_whole = any(verdict.outcome is Outcome.MEMBERSHIP for verdict in _verdicts(job, before))
        if 0 < plan.rules.max_stalled <= now.stalled and before.decision.restore is None and not is_whole:
            yield f"cycle {after.decision.cycle} begins after {now.stalled} cycles without progress"
        if plan.makes_progress or plan.learns:
            continue
        if now.stalled < was.stalled:
            yield f"cycle {after.decision.cycle} has forgotten {was.stalled - now.stalled} cycles without progress"
        if now.last < 0 and _is_known_to_stall(job, before):
            yield f"how far cycle {before.decision.cycle} got is forgotten"
        is_first_from_file = was.first < 0 <= now.first  # it may have been a later file than those before
        if was.last >= 0 and now.stalled == was.stalled and not is_first_from_file and _is_known_to_stall(job, before):
            yield f"cycle {before.decision.cycle} made no progress, and isn't counted"


def _verdicts(job: Job, cycle: Made) -> list[Verdict]:
    return [judged.verdict for judged in job.verdicts if judged.verdict.cycle == cycle.decision.cycle]


def _is_known_to_stall(job: Job, cycle: Made) -> bool:
    """Return True if it failed at a rank: its node has said how far it had got."""
    told = _verdicts(job, cycle)
    return bool(told) and all(
        verdict.outcome is Outcome.FAILED and verdict.cause.kind is CauseKind.SIGNAL for verdict in told
    )


def prefers_good_nodes(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require that a node whose rank has ended a cycle for the second time gives its place to one that stands by.

    Both times by the same coordinator, which alone knows of the first, and in cycles that got further than before.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for before, after in itertools.pairwise(cycles(job)):
        told = [judged for judged in job.verdicts if judged.verdict.cycle == before.decision.cycle]
        got_further = after.decision.advance.last > before.decision.advance.last
        if (
            len(told) != 1
            or told[0].by.name != after.by
            or told[0].verdict.cause.kind not in _BY_RANK
            or trouble.network
        ):
            continue
        host = told[0].verdict.cause.host
        counts[after.by, host] += got_further and told[0].verdict.cause.rerun is None
        trains = {launcher for launcher in job.launchers if launcher.instance in after.members}
        if counts[after.by, host] < _TOO_OFTEN or host not in {f"h{launcher.host.number}" for launcher in trains}:
            continue
        for launcher in set(job.launchers) - trains:
            was_there = launcher.started_s < before.at_s and (launcher.ended_s is None or launcher.ended_s > after.at_s)
            if was_there and not launcher.hurts and launcher.instance not in before.members:
                yield f"{host} has failed again, and trains in cycle {after.decision.cycle}, not {launcher.name}"


def reruns_elsewhere(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Require that another node runs a rank which has asked for that, and that no cycle follows a concluded re-run."""
    told = {judged.verdict.cycle: judged.verdict for judged in job.verdicts if judged.verdict.cause.rerun is not None}
    for before, after in itertools.pairwise(cycles(job)):
        verdict = told.get(before.decision.cycle)
        if verdict is not None and verdict.cause.rerun is Rerun.CONCLUDED:
            yield f"cycle {after.decision.cycle} repeats a re-run that is concluded"
        if verdict is None or verdict.cause.rerun not in WANTS_ANOTHER_GPU or verdict.cause.rank is None:
            continue
        has_others = min(before.decision.world, after.decision.world) > max(1, verdict.cause.rank)
        ran, runs = (members(job, each)[verdict.cause.rank] if has_others else None for each in (before, after))
        if ran is not None and ran is runs:
            yield f"rank {verdict.cause.rank} runs on {ran.name} again in cycle {after.decision.cycle}"
