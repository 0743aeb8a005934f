"""What has to be true of what simulated cycles restore from memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.job.rules.decisions import Decision
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.memory.rules.snapshots import Kept, SnapshotKey
from tests.simulation.history import cut_off, cycles, members

if TYPE_CHECKING:
    from tests.simulation.job import Hurt, Job, Launcher, Made
    from tests.simulation.plan import Plan

__all__ = ["snapshots"]

_RESTORES_S = 0.6
"""A rank restores sooner."""


def snapshots(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Check all of it."""
    log = job.snapshots
    if not plan.snapshots_s:
        if log.messages or log.restored:
            yield f"{log.messages} messages about snapshots in a job without any"
        return
    yield from log.wrong
    begun = {made.decision.cycle: made for made in cycles(job)}
    for each in log.restored:
        restore = begun[each.cycle].decision.restore if each.cycle in begun else None
        if restore is not None and each.key != restore.key:
            yield f"{each.launcher.name} restores {each.key} in cycle {each.cycle}, not {restore.key}"
    for cycle, of_cycle in itertools.groupby(sorted(log.restored, key=lambda r: r.cycle), lambda r: r.cycle):
        if len(keys := {each.key for each in of_cycle}) > 1:
            yield f"cycle {cycle} restores {len(keys)} snapshots"
    yield from _not_restored(job, begun)
    for before, after in itertools.pairwise(cycles(job)):
        yield from _chosen(job, begun, before, after)
        yield from _lost(job, before, after)
    yield from _bad(job)
    yield from _given_up(plan, job)


def _not_restored(job: Job, begun: dict[int, Made]) -> Iterator[str]:
    """Every rank restores what was decided, or says that it can't."""
    for trained in job.trained:
        if trained.cycle not in begun or trained.held is None:
            continue
        restore, lasted_s = begun[trained.cycle].decision.restore, (trained.to_s or job.world.now_s) - trained.from_s
        of_cycle = {each.launcher for each in job.snapshots.restored if each.cycle == trained.cycle}
        of_cycle |= {each for each in job.launchers if any(_is_unrestored(h, trained.cycle) for h in each.hurts)}
        is_frozen = any("frozen" in fault.kind for fault in job.snapshots.trouble.struck)
        if restore is not None and lasted_s > _RESTORES_S and trained.launcher not in of_cycle and not is_frozen:
            yield f"{trained.launcher.name} restores nothing in cycle {trained.cycle}, and {restore.key} was decided"
        if restore is None and trained.launcher in of_cycle:
            yield f"{trained.launcher.name} restores something in cycle {trained.cycle}"


def _is_unrestored(hurt: Hurt, cycle: int) -> bool:
    return hurt.fault.kind == "rank_unrestored" and hurt.cycle == cycle


def _chosen(job: Job, begun: dict[int, Made], before: Made, after: Made) -> Iterator[str]:
    """The newest that all have, of the job's own past; none only for a reason."""
    decision, last = after.decision, before.decision.restore
    key = None if decision.restore is None else decision.restore.key
    if key is not None and not _is_past(key, before.decision, begun):
        yield f"cycle {decision.cycle} restores {key}, which the job has left behind"
    kept = job.snapshots.asked.get(decision.id)
    if kept is None or len(kept) < decision.world:
        return
    spares = _spares(job, before, after)
    keys = {one.key for each in [*kept.values(), *spares] for one in each.snapshots} | ({key} - {None})
    common = {key for key in keys if all(_has(kept, spares, key, place, decision) for place in range(decision.world))}
    newest = max((k for k in common if k.cycle == before.decision.cycle or (last and k == last.key)), default=None)
    if key is not None and key not in common:
        yield f"cycle {decision.cycle} restores {key}, and not all nodes have that"
    elif key is not None and key != newest:
        yield f"cycle {decision.cycle} restores {key}, and all nodes have {newest}"
    reruns = any(j.verdict.cause.rerun for j in job.verdicts if j.verdict.cycle == before.decision.cycle)
    is_again = last is not None and newest == last.key
    if key is None and newest is not None and not reruns and not is_again:
        yield f"cycle {decision.cycle} restores nothing, and all nodes have {newest}"


def _spares(job: Job, before: Made, after: Made) -> list[Kept]:
    """What nodes of the last cycle had said that aren't in the next one, but are there, and were all the time."""
    known, now = job.snapshots.known.get(after.decision.id, {}), members(job, after)
    left = [each for each in members(job, before) if each is not None and each not in now]
    return [known[each.instance] for each in left if each.instance in known and _was_there(job, each, before, after)]


def _was_there(job: Job, launcher: Launcher, before: Made, after: Made) -> bool:
    is_hurt = any(
        hurt.from_s <= after.at_s and hurt.until_s >= before.at_s and not hurt.fault.kind.startswith("rank_")
        for hurt in launcher.hurts
    )
    is_apart = cut_off(job, job.snapshots.trouble, launcher, before.at_s, after.at_s)
    has_ended = launcher.ended_s is not None and launcher.ended_s <= after.at_s
    return not (is_hurt or is_apart or has_ended)


def _has(kept: dict[int, Kept], spares: list[Kept], key: SnapshotKey, place: int, decision: Decision) -> bool:
    """Return True if that place has the segment of its rank, or another node has a copy."""
    if _fits(kept[place], key, place, decision.world):
        return True
    restore = decision.restore
    named = () if restore is None or restore.key != key else restore.sources
    if any(place in source.ranks for source in named):
        return True
    return any(each.port and _fits(each, key, place, decision.world) for each in [*kept.values(), *spares])


def _fits(kept: Kept, key: SnapshotKey, rank: int, world: int) -> bool:
    return any(one.key == key and rank in one.ranks and one.world == world for one in kept.snapshots)


def _is_past(key: SnapshotKey, decision: Decision, begun: dict[int, Made]) -> bool:
    """Return True if what that cycle did followed from the snapshot, or is the cycle in which it was written."""
    if key.cycle == decision.cycle:
        return True
    restore = decision.restore
    if restore is None or key > restore.key or restore.key.cycle not in begun:
        return False
    return key == restore.key or _is_past(key, begun[restore.key.cycle].decision, begun)


def _lost(job: Job, before: Made, after: Made) -> Iterator[str]:
    """What was complete is there for the next cycle, if each node of the last one is there, or whoever has its copy."""
    log = job.snapshots
    complete = log.completed.get(before.decision.cycle)
    then, now = members(job, before), members(job, after)
    kinds = {fault.kind for fault in log.trouble.struck}
    reruns = any(j.verdict.cause.rerun for j in job.verdicts if j.verdict.cycle == before.decision.cycle)
    if complete is None or None in (*then, *now) or reruns or kinds & {"keeper_replaced", "segment_rots"}:
        return
    ran = {each.launcher for each in job.trained if each.cycle == before.decision.cycle}
    if (
        before.decision.world != after.decision.world
        or not set(then) <= ran
        or not all(_is_there(job, complete, each, now) for each in then)
    ):
        return
    restore = after.decision.restore
    if restore is None or restore.key < complete:
        yield f"cycle {after.decision.cycle} restores {restore}, and {complete} was complete"


def _is_there(job: Job, key: SnapshotKey, launcher: Launcher | None, now: list[Launcher | None]) -> bool:
    """Return True if that launcher takes part, or the one whose keeper has a copy of its snapshot."""
    if launcher in now or launcher is None:
        return launcher is not None
    return job.snapshots.copied.get((key, launcher.instance)) in {each.instance for each in now if each is not None}


def _bad(job: Job) -> Iterator[str]:
    """A snapshot from which cycles fail is restored twice at most, and never again."""
    failed, bad = 0, False
    for before, after in itertools.pairwise(cycles(job)):
        key = None if before.decision.restore is None else before.decision.restore.key
        again = after.decision.restore is not None and after.decision.restore.key == job.snapshots.poisoned
        told = [judged.verdict for judged in job.verdicts if judged.verdict.cycle == before.decision.cycle]
        if key is not None and key == job.snapshots.poisoned:
            is_known = bool(told) and all(
                v.outcome is Outcome.FAILED and v.cause.kind is CauseKind.SIGNAL for v in told
            )
            has_restored = any(each.cycle == before.decision.cycle for each in job.snapshots.restored)
            failed += is_known and has_restored
            bad |= not again
            if failed >= 2 and again:
                yield f"cycle {after.decision.cycle} restores {key}, from which {failed} cycles have failed"
        elif bad and again:
            yield f"cycle {after.decision.cycle} restores {job.snapshots.poisoned} again"


def _given_up(plan: Plan, job: Job) -> Iterator[str]:
    """The file has its chance before a job is given up for lack of progress."""
    begun = cycles(job)
    ends = [made for made in job.made if made.decision.code == plan.rules.no_progress_code]
    if not ends or not begun or begun[-1].decision.restore is None:
        return
    told = [judged.verdict for judged in job.verdicts if judged.verdict.cycle == begun[-1].decision.cycle]
    if not any(verdict.cause.rerun for verdict in told):
        yield f"the job is given up after cycle {begun[-1].decision.cycle}, which restored a snapshot"
