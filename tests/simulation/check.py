"""What has to be true of every simulated run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ft.core.agent.effects import Exit
from megatron_ft.core.facts.launcher import CauseKind
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.coordinator import FOUNDING_S
from megatron_ft.job.rules.decisions import DecisionKind
from megatron_ft.job.rules.give_up_policy import HOLDER_STAYS_S
from megatron_ft.job.rules.liveness import lost_s
from megatron_ft.job.rules.member import CUT_OFF_S
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.job.rules.rotation import Rotation
from tests.simulation.history import RANK_FAULTS, cut_off, cycles, members, strikes, suspects
from tests.simulation.in_time import in_time
from tests.simulation.job import FOR_GOOD_S, LOST_A_PEER, WAITED_IN_VAIN
from tests.simulation.learning import learning
from tests.simulation.restored import snapshots
from tests.simulation.rules import (
    ends_for_a_reason,
    has_its_size,
    meets_at_its_store,
    notices_no_progress,
    prefers_good_nodes,
    reruns_elsewhere,
    shuts_down,
    spares_who_waits,
)

if TYPE_CHECKING:
    from tests.simulation.job import Hurt, Job, Judged, Launcher, Made
    from tests.simulation.plan import Fault, Plan

__all__ = ["violations"]

_TEARDOWN_S = 3.0
_CAUSE_S = 0.299
"""So long the cause is waited for if a node has only lost a rank of another one."""
_SETTLES_S = 0.001
"""Within this time a coordinator has acted by what it has heard."""
_EVIDENCE_S = 3.0
"""So long evidence is collected; the end comes sooner if the coordinator's clock jumps."""
_SHOWS_AS = {
    "rank_fails": {CauseKind.SIGNAL},
    "rank_hangs": {CauseKind.HANG},
    "rank_unrestored": {CauseKind.CRASH},
    "ranks_rerun": {CauseKind.REQUEST},
    "rerun_concluded": {CauseKind.CRASH},
    "rank_stalls": {CauseKind.HANG},
    "rank_blocks": {CauseKind.HANG},
    "node_stopped": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
    "all_stopped": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
    "node_excluded": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
}
"""What a fault is called; all others: a lost node."""


def violations(plan: Plan, job: Job, trouble: Any) -> list[str]:
    """What isn't, one line each."""
    always = (_no_two_cycles, _it_ends, _founds_rightly, _stays, has_its_size, meets_at_its_store, spares_who_waits)
    checks = (
        _one_decision,
        _nobody_left_out,
        _counted_once,
        _causes,
        in_time,
        learning,
        _codes,
        _is_said,
        _is_due,
        reruns_elsewhere,
        ends_for_a_reason,
        shuts_down,
        notices_no_progress,
        prefers_good_nodes,
        snapshots,
    )
    # whoever takes the lock after its holder was lost knows only what the others tell
    checks = always if job.lock_lost_s else (*always, *checks)
    return [f"{check.__name__.strip('_')}: {line}" for check in checks for line in check(plan, job, trouble)]


def _one_decision(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Each number is decided once, also by leaders that follow each other."""
    numbers = [made.decision.number for made in job.made]
    if numbers != list(range(len(numbers))):
        yield f"the decisions are numbered {numbers}"
    begun = [made.decision.cycle for made in cycles(job)]
    if begun != list(range(len(begun))):
        yield f"the cycles are numbered {begun}"


def _founds_rightly(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """A job is founded once, as long as a launcher that knows of it can say so."""
    founded = [made for made in job.made if made.decision.number == 0 and made.decision.world]
    for again in founded[1:]:
        for launcher in job.launchers:
            is_there = launcher.ended_s is None or launcher.ended_s > again.at_s
            held = launcher.member.decided
            knows = any(each.launcher is launcher and each.from_s < again.at_s - FOUNDING_S for each in job.trained)
            since_s = again.at_s - FOUNDING_S
            if is_there and knows and held is not None and _is_innocent(launcher, since_s, again.at_s, 0.0):
                if not cut_off(job, trouble, launcher, since_s, again.at_s):
                    yield f"{again.by} founds the job again, and {launcher.name} knows of it"


def _begun(job: Job) -> list[Made]:
    """Without the end of a job that never began."""
    return [made for made in job.made if made.decision.world]


def _is_innocent(launcher: Launcher, since_s: float, until_s: float, margin_s: float) -> bool:
    """No fault hit it then, or shortly before."""
    return not any(hurt.until_s + margin_s >= since_s and hurt.from_s <= until_s for hurt in launcher.hurts)


def _no_two_cycles(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """No two train at once, but for a node that nobody can reach, and that needs a while to notice."""
    began: dict[int, float] = {}
    for trained in job.trained:
        began[trained.cycle] = min(trained.from_s, began.get(trained.cycle, 1e18))
    decided = {made.decision.cycle: made.at_s for made in cycles(job)}
    bound_s = lost_s(plan.nodes + plan.spares) + CUT_OFF_S + _TEARDOWN_S
    for trained in job.trained:
        later = [at_s for cycle, at_s in began.items() if cycle > trained.cycle]
        to_s = job.world.now_s if trained.to_s is None else trained.to_s
        if not later or to_s <= min(later):
            continue
        over_s = to_s - min(later)
        launcher = trained.launcher
        # one that stood still when the cycle was decided reads that as soon as it goes on, and starts its ranks
        if _is_innocent(launcher, decided.get(trained.cycle, trained.from_s), to_s, 0.0) and not trouble.network:
            yield f"{launcher.name} trains in cycle {trained.cycle} for {over_s:.1f} s while a later one does"
        frozen_s = sum(f.seconds for f in plan.faults if "frozen" in f.kind)
        if over_s > bound_s + frozen_s:
            yield f"{launcher.name} trains in cycle {trained.cycle} for {over_s:.1f} s more than it may"


def _it_ends(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Every failure leads to the next cycle, or to the end."""
    left = [launcher.name for launcher in job.launchers if launcher.is_alive]
    if left:
        yield f"still there at the end: {', '.join(left[:5])}"
    left = [process.name for process in job.coordinators if process.is_alive and process.host.is_on]
    if job.is_over() and job.world.now_s > 599 and left:
        yield f"coordinators still there at the end: {', '.join(left)}"


def _nobody_left_out(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Who took part, and to whom nothing happened, takes part in the next cycle."""
    for before, made in itertools.pairwise([m for m in job.made if m.decision.kind is DecisionKind.START]):
        for instance in before.members:
            launcher = job.by_instance(instance)
            if launcher is None or instance in made.members:
                continue
            innocent = _is_innocent(launcher, before.at_s - 10.0, made.at_s, 10.0)
            innocent &= not cut_off(job, trouble, launcher, before.at_s - 10.0, made.at_s)
            dead = launcher.ended_s is not None and launcher.ended_s <= made.at_s
            if innocent and not dead:
                yield f"{launcher.name} has no place in cycle {made.decision.cycle}"
        kept = [instance for instance in before.members if instance in made.members]
        rotates = any(
            j.verdict.rotation is Rotation.NODES for j in job.verdicts if j.verdict.cycle == before.decision.cycle
        )
        if [i for i in made.members if i in kept] != kept and made.by == before.by and not rotates:
            yield f"the order of places is another one in cycle {made.decision.cycle}"


def _counted_once(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """A restart is counted once, and only for a cycle that was ended by a fault."""
    begun = cycles(job)
    failed = {judged.verdict.cycle for judged in job.verdicts if judged.verdict.outcome is Outcome.FAILED}
    blamed: set[Fault] = set()
    for before, after in itertools.pairwise(begun):
        more = after.decision.restarts - before.decision.restarts
        may = suspects(plan, job, trouble, before, after.at_s)
        if more not in (0, 1):
            yield f"cycle {after.decision.cycle} follows {more} restarts at once"
        if more == 1:
            blamed |= {hurt.fault for hurts in may.values() for hurt in hurts}
        if more == 1 and not may:
            yield f"cycle {after.decision.cycle} is a restart, and none of the nodes of the one before had failed"
        if more == 0 and before.decision.cycle in failed and not _may_be_told_twice(job, before.decision.cycle):
            yield f"cycle {before.decision.cycle} failed, and its restart isn't counted"
    restarts = begun[-1].decision.restarts if begun else 0
    if restarts > plan.rules.max_restarts:
        yield f"{restarts} restarts, {plan.rules.max_restarts} are allowed"
    if restarts > len(blamed):
        yield f"{restarts} restarts for {len(blamed)} faults"


def _may_be_told_twice(job: Job, cycle: int) -> bool:
    return len({judged.verdict.outcome for judged in job.verdicts if judged.verdict.cycle == cycle}) > 1


def _causes(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Who is named did it; somebody is, unless that was reported only to a coordinator that is lost."""
    begun = {made.decision.cycle: made for made in cycles(job)}
    for judged in job.verdicts:
        cycle = begun.get(judged.verdict.cycle)
        if judged.verdict.outcome is Outcome.FAILED and cycle is not None:
            wrong = _is_wrong(plan, job, trouble, cycle, judged)
            if wrong:
                yield f"cycle {judged.verdict.cycle} failed, {wrong}: {judged.verdict.cause.text}"


def _is_wrong(plan: Plan, job: Job, trouble: Any, cycle: Made, judged: Judged) -> str:
    """What is wrong about who is named, if anything is."""
    verdict, struck = judged.verdict, strikes(trouble, cycle, judged.at_s)
    may = suspects(plan, job, trouble, cycle, judged.at_s)
    if not may:
        return "and nothing had happened to its nodes"
    if verdict.node is None:
        is_unknown = verdict.cause.text == job_lines.UNKNOWN_FAILURE and judged.by.name != cycle.by and len(struck) > 1
        is_nobodys = verdict.cause.text.startswith("connection lost ")
        return "" if is_unknown or is_nobodys else "and no node is named"
    launcher = members(job, cycle)[verdict.node]
    if launcher is None:
        return ""
    if verdict.cause.kind is CauseKind.HANG and verdict.cause.rank is not None:  # told by another node, maybe
        launcher = members(job, cycle)[verdict.cause.rank] or launcher
    if verdict.cause.host not in ("", f"h{launcher.host.number}"):
        return f"and {launcher.name} is called {verdict.cause.host}"
    if LOST_A_PEER in verdict.cause.text or WAITED_IN_VAIN in verdict.cause.text:
        is_right = _may_be_named(launcher, cycle, judged, may, struck)
        return "" if is_right else f"and {launcher.name} is named, which followed"
    if launcher not in may:
        return f"and {launcher.name} is named"
    return _does_not_fit(plan, cycle, judged, launcher, may)


def _may_be_named(
    launcher: Launcher, cycle: Made, judged: Judged, may: dict[Launcher, list[Hurt]], struck: list[Fault]
) -> bool:
    """Whether the cause couldn't be known when a node was named that had only lost a rank of another one."""
    if len(struck) > 1 or judged.by.name != cycle.by:  # one that has just taken over waits for silent nodes
        return True
    (trained,) = [
        each for each in launcher.job.trained if each.launcher is launcher and each.cycle == cycle.decision.cycle
    ]
    known = judged.by.known  # nothing of one whose connection was reset: it may be back
    is_known = any(known.get(each.instance, FOR_GOOD_S) + _SETTLES_S <= judged.at_s for each in may)
    return (trained.to_s or judged.at_s) + _CAUSE_S <= judged.at_s and not is_known


def _does_not_fit(plan: Plan, cycle: Made, judged: Judged, launcher: Launcher, may: dict[Launcher, list[Hurt]]) -> str:
    """What is wrong with what a node is named for, if anything is."""
    verdict, kinds = judged.verdict, {hurt.fault.kind for hurt in may[launcher]}
    if plan.rules.min_healthy and verdict.nodes > 1:
        return ""
    shown_as = set().union(*(_SHOWS_AS.get(kind, {CauseKind.MEMBERSHIP}) for kind in kinds))
    # while a cycle ends for another reason, the exit of a rank is told before what it has asked for
    shown_as |= {CauseKind.CRASH} if "node_excluded" in kinds and len(may) > 1 else set()
    if verdict.cause.kind not in shown_as:
        return f"and {launcher.name} is named for {verdict.cause.kind.value}, not {', '.join(sorted(kinds))}"
    if verdict.cause.kind is CauseKind.HANG:
        return _is_wrong_about_hang(cycle, judged, may)
    if kinds <= RANK_FAULTS and verdict.cause.rank != verdict.node:
        return f"and rank {verdict.cause.rank} of {launcher.name} is named"
    return ""


def _is_wrong_about_hang(cycle: Made, judged: Judged, may: dict[Launcher, list[Hurt]]) -> str:
    """The same for a hang, which is often found by another node than the one where it is.

    A rank that has finished is a suspect, too, if others wait.
    """
    job, rank = judged.by.job, judged.verdict.cause.rank
    ran = [each for each in job.trained if each.cycle == cycle.decision.cycle]
    ended = {each.launcher for each in ran if each.to_s is not None and each.to_s <= judged.at_s}
    if rank is None:
        is_only = all(hurt.fault.kind == "rank_hangs" for hurts in may.values() for hurt in hurts)
        jumped = any(each.from_s + _EVIDENCE_S > judged.at_s >= each.from_s for each in judged.by.host.jumps)
        return "" if len(may) > 1 or ended or jumped or not is_only else "and no rank is named"
    named = members(job, cycle)[rank]
    return "" if named is None or named in may or named in ended else f"and rank {rank} is named"


def _is_said(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Why a cycle ended is said by at least one launcher, where one of its launchers went on to the next."""
    for launcher in job.launchers:
        cycles = [trained.cycle for trained in job.trained if trained.launcher is launcher]
        for cycle in cycles[:-1]:
            if not any(text.startswith(f"cycle {cycle} ended: ") for text in job.said):
                yield f"no launcher has said why cycle {cycle} ended"


def _codes(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """All launchers that saw the job's end say the same of it."""
    ends = {m.decision.code for m in _begun(job) if m.decision.kind is DecisionKind.END}
    if len(ends) > 1:
        yield f"the job ended with {sorted(ends)}"
    codes = {launcher.code for launcher in _who_saw_the_end(job, trouble)}
    if len(codes) > 1:
        names = [f"{launcher.name}: {launcher.code} ({launcher.left_by})" for launcher in job.launchers][:8]
        yield f"exit codes {sorted(codes)}: {'; '.join(names)}"
    quiet = all(f.kind in ("newcomer", "clock_jumps", "coordinator_killed") for f in (*plan.faults, *trouble.struck))
    if quiet and codes - {0}:
        yield f"nothing happened, and the exit codes are {sorted(codes)}"


def _stays(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """The launcher of a node that is left out is there until the job's end, and ends with its code."""
    ends = [made for made in _begun(job) if made.decision.kind is DecisionKind.END]
    for launcher in job.launchers:
        if launcher.stays_since_s is None or launcher.how is None or launcher.how is Exit.STOPPED:
            continue
        if launcher.ranks is not None and launcher.ranks.from_s > launcher.stays_since_s:
            yield f"{launcher.name} is left out, and has ranks again"
        again = [at_s for at_s in launcher.touched if at_s > launcher.stays_since_s]
        # no leader may be left then that could tell it the job's exit code
        was_over = any(made.at_s < launcher.stays_since_s for made in ends)
        if again or was_over or job.lock_lost_s or trouble.network or launcher.how is not Exit.STAYED:
            continue
        before = [made for made in ends if made.at_s <= (launcher.ended_s or 0.0)]
        if ends and not before:
            yield f"{launcher.name} was left out, and ended before the job"
        elif before and launcher.code != before[-1].decision.code:
            yield f"{launcher.name} was left out, and ended with {launcher.code}: {launcher.left_by}"


_HARMLESS = {"clock_jumps", "newcomer", "coordinator_killed", "coordinator_dies_at_effect", "coordinator_dies_deciding"}
_FAILURES = {
    "rank_fails",
    "rank_unrestored",
    "keeper_replaced",
    "segment_rots",
    "rank_hangs",
    "rank_stalls",
    "rank_blocks",
}
_LEAVING = {"all_stopped", "node_stopped", "node_excluded", "shutdown_asked"}
_FOR_A_WHILE = {
    "host_cut",
    "pair_cut",
    "one_way_cut",
    "packets_lost",
    "launcher_frozen",
    "coordinator_frozen",
    "host_frozen",
    "connection_reset",
}
_STARTED_AGAIN = {"launcher_killed", "host_off"}
_BEARABLE_S = 50.0
"""A round that lacks nodes is given up after 90 s."""


def _is_due(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """A job whose faults it can bear comes to a good end."""
    if _is_bearable(plan, job, trouble):
        codes = {launcher.code for launcher in _who_saw_the_end(job, trouble) if launcher.ranks is not None}
        if codes - {0}:
            yield f"all faults could be borne, and the exit codes are {sorted(codes)}"


def _is_bearable(plan: Plan, job: Job, trouble: Any) -> bool:
    """The lock's holder isn't hit, MIN are there or come back, and there are restarts enough."""
    rules, faults = plan.rules, trouble.struck
    kinds = [fault.kind for fault in faults]
    if not job.made or any(at_s <= job.made[0].at_s for at_s, _ in trouble.hit):
        return False
    if _LEAVING & set(kinds) or "split" in kinds:
        return False
    hit = [fault for fault in faults if fault.kind not in _HARMLESS | _FAILURES]
    for_good = sum(not _is_back(fault, trouble) for fault in hit) + _resets_of_cut_off(job, trouble)
    failures = len(faults) - kinds.count("clock_jumps") - kinds.count("newcomer")
    worlds = [made.decision.world for made in job.made if made.decision.kind is DecisionKind.START]
    enough = min(worlds, default=0) > len(hit) and plan.nodes - for_good >= rules.min_nodes
    restarts = failures <= rules.max_restarts and (not rules.max_stalled or failures < rules.max_stalled)
    return enough and restarts and sum(fault.seconds for fault in hit if _is_back(fault, trouble)) < _BEARABLE_S


def _is_back(fault: Fault, trouble: Any) -> bool:
    """Whether there is a launcher again afterwards."""
    if fault.kind in _STARTED_AGAIN:
        return fault.comes_back and bool(trouble.may_come_back())
    return fault.kind in _FOR_A_WHILE or fault.kind == "node_ill"


def _resets_of_cut_off(job: Job, trouble: Any) -> int:
    """Launchers whose connection was reset while they were cut off: taken for ended, because they can't come back."""
    hurts = [(launcher, hurt) for launcher in job.launchers for hurt in launcher.hurts]
    resets = [(launcher, hurt.from_s) for launcher, hurt in hurts if hurt.fault.kind == "connection_reset"]
    return sum(
        bool(cut_off(job, trouble, launcher, at_s, at_s))
        or any(each.fault.kind.endswith("_frozen") and each.from_s <= at_s <= each.until_s for each in launcher.hurts)
        for launcher, at_s in resets
    )


def _who_saw_the_end(job: Job, trouble: Any) -> list[Launcher]:
    """Launchers that have ended, that no fault has hit, and that could know how the job ended."""
    last = max((trained.cycle for trained in job.trained), default=-1)
    ended = [launcher for launcher in job.launchers if launcher.code is not None]
    return [launcher for launcher in ended if _saw_the_end(launcher, job, last, trouble)]


def _saw_the_end(launcher: Launcher, job: Job, last: int, trouble: Any) -> bool:
    # one that stood by in the last cycle can't know how it ended
    took_part = launcher.ranks is not None and launcher.ranks.cycle == last
    could_know = took_part and not _was_out_of_reach(launcher, job, trouble)
    return not launcher.touched and "stopped by" not in launcher.left_by and (could_know or launcher.code != 94)


def _was_out_of_reach(launcher: Launcher, job: Job, trouble: Any) -> bool:
    """It couldn't reach the leader when the job's end was decided, or as long as that was there to tell it."""
    ends = [made for made in _begun(job) if made.decision.kind is DecisionKind.END]
    return any(cut_off(job, trouble, launcher, end.at_s, end.at_s + HOLDER_STAYS_S) for end in ends)
