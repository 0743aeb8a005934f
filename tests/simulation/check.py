"""What has to be true of every simulated run: its decisions, its causes, and how it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.coordinator import FORMER_S, FOUNDING_S
from megatron_ft.job.rules.etcd_keys import LEASE_S
from megatron_ft.job.rules.liveness import lost_s
from megatron_ft.job.rules.member import CUT_OFF_S, HOLDER_STAYS_S
from megatron_ft.job.rules.restart_policy import Action, Outcome, Rotation
from megatron_ft.launcher.rules.events import Exit
from megatron_ft.link.base.rerun import WANTS_ANOTHER_GPU, Rerun
from megatron_ft.link.facts.launcher import CauseKind
from tests.simulation.history import (
    FOR_A_WHILE,
    RANK_FAULTS,
    STOPS,
    cut_off,
    cycles,
    ends,
    is_innocent,
    members,
    strikes,
    suspects,
    verdicts_on,
)
from tests.simulation.in_time import in_time
from tests.simulation.job import FOR_GOOD_S, LOST_A_PEER
from tests.simulation.leader import FORMER

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher, Made
    from tests.simulation.leader import Judged
    from tests.simulation.plan import Fault, Hurt

_TEARDOWN_S = 3.0
_CAUSE_S = 0.299
"""A cause is waited for so long if a node has only lost a rank of another one."""
_SETTLES_S = 0.001
"""Within this time a coordinator has acted by what it has heard."""
_ALONE_S = 3.0
"""Within this time of what has ended a cycle nothing else happens that ends the job."""
_IN_FLIGHT_S = 2.0
"""A cycle may begin within this time after the end of the job was asked for: its nodes are being asked."""
_BEARABLE_S = 50.0
"""A round that lacks nodes is given up after 90 s."""
_BACK_S = 6.0
"""A launcher that looks for the endpoint, and its host, have reached each other by then."""
_SHOWS_AS = {
    "rank_fails": {CauseKind.SIGNAL},
    "rank_hangs": {CauseKind.HANG},
    "ranks_rerun": {CauseKind.REQUEST},
    "rerun_concluded": {CauseKind.CRASH},
    "node_stopped": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
    "all_stopped": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
    "node_excluded": {CauseKind.REQUEST, CauseKind.MEMBERSHIP},
}
"""What a fault is called; all others: a lost node."""
_HARMLESS = {"newcomer", "coordinator_killed", "coordinator_dies_at_effect", "coordinator_dies_deciding"}
_HARMLESS |= {"answers_lost"}
_FAILURES = {"rank_fails", "rank_hangs"}
_LEAVING = {*STOPS, "node_excluded", "shutdown_asked", "rerun_concluded"}


def violations(job: Job) -> list[str]:
    """Return what isn't true, one line each."""
    always: tuple[Callable[[Job], Iterator[str]], ...]
    always = (no_two_cycles, it_ends, founds_rightly, stays, has_its_size, begins_by_a_decision)
    checks = (
        one_decision,
        nobody_left_out,
        counted_once,
        causes,
        in_time,
        codes,
        is_said,
        is_due,
        reruns_elsewhere,
        ends_for_a_reason,
        shuts_down,
        notices_no_progress,
        survives_etcd,
    )
    # a launcher that sees etcd only after the job's end may begin another run
    may_be_next = job.plan.in_etcd and (
        any(end.at_s <= launcher.saw_etcd_s < FOR_GOOD_S for end in ends(job) for launcher in job.launchers)
        or _founded_by_others(job)
    )
    # whoever takes the lock after its holder was lost knows only what the others tell
    asked = always if job.lock_lost_s or may_be_next else (*always, *checks)
    excused = {no_two_cycles} if may_be_next else set()
    return [f"{check.__name__}: {line}" for check in asked if check not in excused for line in check(job)]


def _founded_by_others(job: Job) -> bool:
    """Return True if another run was begun in etcd while nothing could be heard of this one's launchers."""
    for again in [made for made in job.made if made.decision.number == 0 and made.decision.world][1:]:
        knew = {each.launcher for each in job.trained if each.from_s < again.at_s - FORMER_S}
        if not any(is_innocent(each, again.at_s - FORMER_S, again.at_s) for each in knew):
            return True
    return False


# -- decisions ------------------------------------------------------------------------------------------------


def one_decision(job: Job) -> Iterator[str]:
    """Require that each number is decided once, also by leaders that follow each other, or believe that they lead."""
    numbers = [made.decision.number for made in job.made]
    first = FORMER + 1 if job.plan.had_former and FORMER + 1 in numbers[:1] else 0
    if numbers != list(range(first, first + len(numbers))):
        yield f"the decisions are numbered {numbers}"
    begun = [made.decision.cycle for made in cycles(job)]
    if begun != list(range(len(begun))):
        yield f"the cycles are numbered {begun}"


def founds_rightly(job: Job) -> Iterator[str]:
    """Require that a job is founded once, as long as a launcher that knows of it can say so."""
    founded = [made for made in job.made if made.decision.number == 0 and made.decision.world]
    for again in founded[1:]:
        if again.decision.world == job.plan.rules.max_nodes:
            continue  # MAX fresh launchers found a job at once
        since_s = again.at_s - FOUNDING_S
        for launcher in job.launchers:
            knows = any(each.launcher is launcher and each.from_s < since_s for each in job.trained)
            is_there = launcher.started_s < since_s and (launcher.ended_s is None or launcher.ended_s > again.at_s)
            is_there = is_there and launcher.member.decided is not None
            is_there = is_there and launcher.stays_since_s is None  # an excluded one founds nothing
            if is_there and knows and is_innocent(launcher, since_s, again.at_s):
                yield f"{again.by} founds the job again, and {launcher.name} knows of it"


def begins_by_a_decision(job: Job) -> Iterator[str]:
    """Require that ranks are started by a durable decision, and meet at the store that its first node has opened."""
    made, used = {each.decision.id: each for each in job.made}, dict[str, str]()
    for trained in job.trained:
        decision, store = trained.held.decision, trained.held.store
        if decision.id not in made or made[decision.id].at_s > trained.from_s:
            yield f"{trained.launcher.name} starts ranks of cycle {trained.cycle}, which nobody has decided"
        elif (
            job.stores.get(store) != made[decision.id].members[0] or used.setdefault(store, decision.id) != decision.id
        ):
            yield f"{trained.launcher.name} starts ranks of cycle {trained.cycle} with the store {store!r}"


def no_two_cycles(job: Job) -> Iterator[str]:
    """Require that no two train at once, but for a node that nobody can reach, and that needs a while to notice."""
    began: dict[int, float] = {}
    for trained in job.trained:
        began[trained.cycle] = min(trained.from_s, began.get(trained.cycle, FOR_GOOD_S))
    decided = {made.decision.cycle: made.at_s for made in cycles(job)}
    bound_s = lost_s(job.plan.nodes + job.plan.spares) + CUT_OFF_S + _TEARDOWN_S
    # a leader that is cut off from etcd leads its own side on
    longer = ("frozen", "split", "cut") if job.plan.in_etcd else ("frozen",)
    bound_s += sum(hurt.fault.seconds for hurt in job.struck if any(word in hurt.fault.kind for word in longer))
    for trained in job.trained:
        launcher, to_s = trained.launcher, job.world.now_s if trained.to_s is None else trained.to_s
        over_s = to_s - min((at_s for cycle, at_s in began.items() if cycle > trained.cycle), default=to_s)
        # one that stood still when the cycle was decided reads that as soon as it goes on, and starts its ranks
        since_s = decided.get(trained.cycle, trained.from_s)
        is_hit = any(hurt.until_s >= since_s and hurt.from_s <= to_s for hurt in launcher.hurts)
        if over_s > 0.0 and not is_hit and not job.network:
            yield f"{launcher.name} trains in cycle {trained.cycle} for {over_s:.1f} s while a later one does"
        if over_s > bound_s:
            yield f"{launcher.name} trains in cycle {trained.cycle} for {over_s:.1f} s more than it may"


def has_its_size(job: Job) -> Iterator[str]:
    """Require MIN to MAX nodes in each cycle."""
    for cycle in cycles(job):
        if not job.plan.rules.min_nodes <= cycle.decision.world <= job.plan.rules.max_nodes:
            yield f"cycle {cycle.decision.cycle} has {cycle.decision.world} nodes"
        if len(set(cycle.members)) != len(cycle.members):
            yield f"a node has two places in cycle {cycle.decision.cycle}"


def nobody_left_out(job: Job) -> Iterator[str]:
    """Require that a launcher which took part, and to which nothing happened, takes part in the next cycle."""
    for before, made in itertools.pairwise(cycles(job)):
        for launcher in members(job, before):
            if launcher is None or launcher.instance in made.members:
                continue
            is_hit = not is_innocent(launcher, before.at_s - 10.0, made.at_s, before_s=10.0)
            is_dead = launcher.ended_s is not None and launcher.ended_s <= made.at_s
            if not is_hit and not is_dead:
                yield f"{launcher.name} has no place in cycle {made.decision.cycle}"
        kept = [instance for instance in before.members if instance in made.members]
        rotates = any(verdict.rotation is Rotation.NODES for verdict in verdicts_on(job, before))
        if [i for i in made.members if i in kept] != kept and made.by == before.by and not rotates:
            yield f"the order of places is another one in cycle {made.decision.cycle}"


def reruns_elsewhere(job: Job) -> Iterator[str]:
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


# -- restarts -------------------------------------------------------------------------------------------------


def counted_once(job: Job) -> Iterator[str]:
    """Require that a restart is counted once, and only for a cycle that was ended by a fault."""
    begun, blamed = cycles(job), set()
    for before, after in itertools.pairwise(begun):
        more = after.decision.restarts - before.decision.restarts
        may = suspects(job, before, after.at_s)
        outcomes = {verdict.outcome for verdict in verdicts_on(job, before)}
        if more not in (0, 1):
            yield f"cycle {after.decision.cycle} follows {more} restarts at once"
        if more == 1:
            blamed |= {hurt.fault for hurts in may.values() for hurt in hurts}
        if more == 1 and not may:
            yield f"cycle {after.decision.cycle} is a restart, and none of the nodes of the one before had failed"
        if more == 0 and outcomes == {Outcome.FAILED}:
            yield f"cycle {before.decision.cycle} failed, and its restart isn't counted"
    restarts = begun[-1].decision.restarts if begun else 0
    if restarts > job.plan.rules.max_restarts:
        yield f"{restarts} restarts, {job.plan.rules.max_restarts} are allowed"
    if restarts > len(blamed) and not any(fault.kind == "packets_lost" for fault in blamed):
        yield f"{restarts} restarts for {len(blamed)} faults"


def notices_no_progress(job: Job) -> Iterator[str]:
    """Require that failed cycles which get no further are counted, by all coordinators together, and end the job."""
    for before, after in itertools.pairwise(cycles(job)):
        was, now, told = before.decision.advance, after.decision.advance, verdicts_on(job, before)
        # a cycle that ended for a node that came hasn't failed
        is_whole = any(verdict.outcome is Outcome.MEMBERSHIP for verdict in told)
        if 0 < job.plan.rules.max_stalled <= now.stalled and not is_whole:
            yield f"cycle {after.decision.cycle} begins after {now.stalled} cycles without progress"
        if job.plan.makes_progress:
            continue
        if now.stalled < was.stalled:
            yield f"cycle {after.decision.cycle} has forgotten {was.stalled - now.stalled} cycles without progress"
        # it failed at a rank: its node has said how far it had got
        is_known = bool(told) and all(v.outcome is Outcome.FAILED and v.cause.kind is CauseKind.SIGNAL for v in told)
        if now.last < 0 and is_known:
            yield f"how far cycle {before.decision.cycle} got is forgotten"
        is_first_from_file = was.first < 0 <= now.first  # it may have been a later file than those before
        if was.last >= 0 and now.stalled == was.stalled and not is_first_from_file and is_known:
            yield f"cycle {before.decision.cycle} made no progress, and isn't counted"


def ends_for_a_reason(job: Job) -> Iterator[str]:
    """Require a reason for each end of a cycle that isn't a failure."""
    begun = {made.decision.cycle: made for made in cycles(job)}
    for judged in job.verdicts:
        cycle, number = begun.get(judged.verdict.cycle), judged.verdict.cycle
        if cycle is None:
            continue
        ran = [each for each in job.trained if each.cycle == number]
        still = [each.launcher.name for each in ran if each.from_s <= judged.at_s < (each.to_s or FOR_GOOD_S)]
        match judged.verdict.outcome:
            case Outcome.MEMBERSHIP if not _may_change(job, cycle, judged):
                yield f"cycle {number} ended for other nodes: {judged.verdict.cause.text}"
            case Outcome.STOPPED if not _is_asked_to_stop(job, judged.at_s):
                yield f"cycle {number} was stopped, and no rank had asked for that"
            case Outcome.MEMBERSHIP if _ends_after_all(job, judged):
                yield f"cycle {number} was to be restarted without {judged.verdict.cause.host}"
            case Outcome.SUCCEEDED if still and not job.plan.rules.min_healthy:
                yield f"cycle {number} has succeeded, and {', '.join(still)} trains"


def _may_change(job: Job, cycle: Made, judged: Judged) -> bool:
    """Return True if a node of the cycle had been excluded, or one may join at once."""
    launchers = [launcher for launcher in members(job, cycle) if launcher is not None]
    if any(h.fault.kind == "node_excluded" and h.from_s <= judged.at_s for each in launchers for h in each.hurts):
        return True
    if len(launchers) < cycle.decision.world:
        return True
    others = [each for each in job.launchers if each not in launchers and each.started_s <= judged.at_s]
    waits = any(each.ended_s is None or each.ended_s >= cycle.at_s for each in others)
    is_full = cycle.decision.world >= job.plan.rules.max_nodes
    was_lost = job.network or any(each.hurts for each in launchers)  # and joins again
    return job.plan.rules.at_once and (was_lost or (waits and not is_full))


def _ends_after_all(job: Job, judged: Judged) -> bool:
    """Return True if the job ends as one that can't continue, though it was to, and nothing else has happened."""
    follows = [made.decision for made in job.made if made.at_s >= judged.at_s]
    if judged.verdict.decision.action is not Action.RESTART or not follows:
        return False
    near: list[object] = [hurt for hurt in job.struck if abs(hurt.from_s - judged.at_s) < _ALONE_S]
    near += [
        each for each in job.launchers if each.code is None and abs((each.ended_s or 0.0) - judged.at_s) < _ALONE_S
    ]
    return len(near) == 1 and judged.verdict.node is not None and follows[0].code == 1


def _is_asked_to_stop(job: Job, until_s: float) -> bool:
    """Return True if a rank has asked for the end of the job, or the launcher that holds the endpoint was stopped."""
    asked = [(each, hurt) for each in job.launchers for hurt in each.hurts if hurt.from_s <= until_s]
    return any(h.fault.kind == "shutdown_asked" or (each.member.owns and h.fault.kind in STOPS) for each, h in asked)


def shuts_down(job: Job) -> Iterator[str]:
    """Require that no cycle begins after a rank has asked for the end of the job, if its launcher is there to say so.

    Nor does the one in which it has asked succeed: its node says that it has finished later than what it has asked for.
    """
    yield from sorted({f"{each}, and had been asked for the end of the job" for each in job.heedless})
    asked = [(each, hurt) for each in job.launchers for hurt in each.hurts if hurt.fault.kind == "shutdown_asked"]
    for launcher, hurt in asked:
        text = f"{launcher.name} has asked for the end of the job"
        for judged in job.verdicts:
            is_success = judged.verdict.cycle == hurt.cycle and judged.verdict.outcome is Outcome.SUCCEEDED
            if is_success and not job.plan.rules.min_healthy and not _is_hit_too(launcher, hurt, judged.at_s):
                yield f"cycle {hurt.cycle} succeeds, and {text}"
        for made in cycles(job):
            is_later = made.decision.cycle > (hurt.cycle or 0) and made.at_s > hurt.from_s + _IN_FLIGHT_S
            if is_later and launcher.instance in made.members and not _is_hit_too(launcher, hurt, made.at_s):
                yield f"cycle {made.decision.cycle} begins after {text}"


def _is_hit_too(launcher: Launcher, asked: Hurt, until_s: float) -> bool:
    """Return True if something else hit a launcher after a rank of it had asked for the end of the job."""
    others = [each for each in launcher.hurts if each.fault.kind != "shutdown_asked"]
    was_hurt = any(each.from_s <= until_s and each.until_s >= asked.from_s - 2.0 for each in others)
    return was_hurt or bool(cut_off(launcher.job, launcher, asked.from_s - 2.0, until_s))


# -- causes ---------------------------------------------------------------------------------------------------


def causes(job: Job) -> Iterator[str]:
    """Require that the node which is named did it; one is, unless that was told only to a coordinator that is lost."""
    begun = {made.decision.cycle: made for made in cycles(job)}
    for judged in job.verdicts:
        cycle = begun.get(judged.verdict.cycle)
        if judged.verdict.outcome is Outcome.FAILED and cycle is not None and (wrong := _is_wrong(job, cycle, judged)):
            yield f"cycle {judged.verdict.cycle} failed, {wrong}: {judged.verdict.cause.text}"


def _is_wrong(job: Job, cycle: Made, judged: Judged) -> str:
    """Return what is wrong about the node that is named, if anything is."""
    verdict, cause, struck = judged.verdict, judged.verdict.cause, strikes(job, cycle, judged.at_s)
    may = suspects(job, cycle, judged.at_s)
    if not may:  # its launchers may have left, one after the other
        has_left = any(each and (each.ended_s or FOR_GOOD_S) <= judged.at_s for each in members(job, cycle))
        return "" if has_left else "and nothing had happened to its nodes"
    if verdict.node is None:
        is_unknown = cause.text == job_lines.UNKNOWN_FAILURE and judged.by.name != cycle.by and len(struck) > 1
        return "" if is_unknown or cause.text.startswith("connection lost ") else "and no node is named"
    launcher = members(job, cycle)[verdict.node]
    if launcher is None:
        return ""
    if cause.kind is CauseKind.HANG and cause.rank is not None:  # told by another node, maybe
        launcher = members(job, cycle)[cause.rank] or launcher
    if cause.host not in ("", f"h{launcher.host.number}"):
        return f"and {launcher.name} is called {cause.host}"
    if LOST_A_PEER in cause.text:
        is_right = len(struck) > 1 or _may_follow(launcher, cycle, judged, may)
        return "" if is_right else f"and {launcher.name} is named, which followed"
    if launcher not in may:
        return f"and {launcher.name} is named"
    kinds = {hurt.fault.kind for hurt in may[launcher]}
    if job.plan.rules.min_healthy and verdict.nodes > 1:
        return ""
    shown_as = set().union(*(_SHOWS_AS.get(kind, {CauseKind.MEMBERSHIP}) for kind in kinds))
    # while a cycle ends for another reason, the exit of a rank is told before what it has asked for
    shown_as |= {CauseKind.CRASH} if "node_excluded" in kinds and len(may) > 1 else set()
    if cause.kind not in shown_as:
        return f"and {launcher.name} is named for {cause.kind.value}, not {', '.join(sorted(kinds))}"
    if cause.kind is CauseKind.HANG:
        return _is_wrong_about_hang(job, cycle, judged, may)
    is_other = kinds <= RANK_FAULTS and cause.rank != verdict.node
    return f"and rank {cause.rank} of {launcher.name} is named" if is_other else ""


def _may_follow(launcher: Launcher, cycle: Made, judged: Judged, may: dict[Launcher, list[Hurt]]) -> bool:
    """Return True if the cause couldn't be known when a node was named that had only lost a rank of another one."""
    if judged.by.name != cycle.by:  # one that has just taken over waits for silent nodes
        return True
    job, number = launcher.job, cycle.decision.cycle
    (trained,) = [each for each in job.trained if each.launcher is launcher and each.cycle == number]
    known = judged.by.known  # nothing of one whose connection was reset: it may be back
    is_known = any(known.get(each.instance, FOR_GOOD_S) + _SETTLES_S <= judged.at_s for each in may)
    return (trained.to_s or judged.at_s) + _CAUSE_S <= judged.at_s and not is_known


def _is_wrong_about_hang(job: Job, cycle: Made, judged: Judged, may: dict[Launcher, list[Hurt]]) -> str:
    """Return the same for a hang, which is often found by another node than the one where it is.

    A rank that has finished is a suspect, too, if others wait.
    """
    rank = judged.verdict.cause.rank
    ran = [each for each in job.trained if each.cycle == cycle.decision.cycle]
    ended = {each.launcher for each in ran if each.to_s is not None and each.to_s <= judged.at_s}
    if rank is None:
        is_only = all(hurt.fault.kind == "rank_hangs" for hurts in may.values() for hurt in hurts)
        was_reset = any(hurt.fault.kind == "connection_reset" for hurt in job.struck)  # what is on its way is lost
        return "" if len(may) > 1 or ended or was_reset or not is_only else "and no rank is named"
    named = members(job, cycle)[rank]
    return "" if named is None or named in may or named in ended else f"and rank {rank} is named"


def is_said(job: Job) -> Iterator[str]:
    """Require that at least one launcher says why a cycle ended, where one of its launchers went on to the next."""
    for launcher in job.launchers:
        for cycle in [trained.cycle for trained in job.trained if trained.launcher is launcher][:-1]:
            told = {each.verdict.printer: each.at_s for each in job.verdicts if each.verdict.cycle == cycle}
            prints = [each for each in job.launchers if each.instance in told]
            was_hit = any(not is_innocent(each, told[each.instance], told[each.instance] + 3.0) for each in prints)
            if not was_hit and not any(text.startswith(f"cycle {cycle} ended: ") for text in job.said):
                yield f"no launcher has said why cycle {cycle} ended"


# -- the end --------------------------------------------------------------------------------------------------


def it_ends(job: Job) -> Iterator[str]:
    """Require that every failure leads to the next cycle, or to the end."""
    left = [launcher.name for launcher in job.launchers if launcher.is_alive]
    if left:
        yield f"still there at the end: {', '.join(left[:5])}"
    left = [process.name for process in job.coordinators if process.is_alive and process.host.is_on]
    if job.is_over() and job.world.now_s > 599 and left:
        yield f"coordinators still there at the end: {', '.join(left)}"


def codes(job: Job) -> Iterator[str]:
    """Require that all launchers that saw the job's end say the same of it."""
    decided = {made.decision.code for made in ends(job)}
    if len(decided) > 1:
        yield f"the job ended with {sorted(decided)}"
    codes = {launcher.code or 0 for launcher in _saw_the_end(job)}
    if len(codes) > 1:
        names = [f"{launcher.name}: {launcher.code} ({launcher.left_by})" for launcher in job.launchers][:8]
        yield f"exit codes {sorted(codes)}: {'; '.join(names)}"
    kinds = {fault.kind for fault in job.plan.faults} | {hurt.fault.kind for hurt in job.struck}
    if kinds <= {"newcomer", "coordinator_killed", "answers_lost"} and codes - {0}:
        yield f"nothing happened, and the exit codes are {sorted(codes)}"


def stays(job: Job) -> Iterator[str]:
    """Require that the launcher of a node that is left out is there until the job's end, and ends with its code."""
    for launcher in job.launchers:
        if launcher.stays_since_s is None or launcher.how is None or launcher.how is Exit.STOPPED:
            continue
        if launcher.ranks is not None and launcher.ranks.from_s > launcher.stays_since_s:
            yield f"{launcher.name} is left out, and has ranks again"
        again = [hurt for hurt in launcher.hurts if hurt.until_s > launcher.stays_since_s]
        # no leader may be left then that could tell it the job's exit code
        was_over = any(made.at_s < launcher.stays_since_s for made in ends(job))
        if again or was_over or job.lock_lost_s or job.network or launcher.how is not Exit.STAYED:
            continue
        before = [made for made in ends(job) if made.at_s <= (launcher.ended_s or 0.0)]
        if ends(job) and not before:
            yield f"{launcher.name} was left out, and ended before the job"
        elif before and launcher.code != before[-1].decision.code:
            yield f"{launcher.name} was left out, and ended with {launcher.code}: {launcher.left_by}"


def is_due(job: Job) -> Iterator[str]:
    """Require that a job whose faults it can bear comes to a good end."""
    if _is_bearable(job):
        codes = {launcher.code or 0 for launcher in _saw_the_end(job) if launcher.ranks is not None}
        if codes - {0}:
            yield f"all faults could be borne, and the exit codes are {sorted(codes)}"


def _is_bearable(job: Job) -> bool:
    """Return True if the endpoint's launcher isn't hit, MIN are there or come back, and there are restarts enough."""
    rules, faults = job.plan.rules, [hurt.fault for hurt in job.struck]
    kinds = [fault.kind for fault in faults]
    if not job.made or any(hurt.from_s <= job.made[0].at_s for hurt in job.struck):
        return False
    if _LEAVING & set(kinds) or "split" in kinds:
        return False
    if "connection_reset" in kinds and FOR_A_WHILE & set(kinds):  # it can't come back, and is taken for ended
        return False
    hit = [fault for fault in faults if fault.kind not in _HARMLESS | _FAILURES]
    for_good = sum(not _is_back(job, fault) for fault in hit)
    failures = len(faults) - kinds.count("newcomer")
    enough = min((made.decision.world for made in cycles(job)), default=0) > len(hit)
    enough = enough and job.plan.nodes - for_good >= rules.min_nodes
    restarts = failures <= rules.max_restarts and (not rules.max_stalled or failures < rules.max_stalled)
    lasts_s = sum(fault.seconds for fault in hit if _is_back(job, fault)) + (LEASE_S if job.plan.in_etcd else 0.0)
    # in a Slurm step launchers look for the endpoint no longer than that
    longest_s = CUT_OFF_S - _BACK_S if rules.launchers and not job.plan.in_etcd else _BEARABLE_S
    return enough and restarts and lasts_s < longest_s


def _is_back(job: Job, fault: Fault) -> bool:
    """Return True if there is a launcher again afterwards."""
    kind = fault.kind
    if kind in ("launcher_killed", "host_off"):
        return fault.comes_back and not job.plan.rules.launchers
    return kind in FOR_A_WHILE or kind in ("node_ill", "connection_reset")


def _saw_the_end(job: Job) -> list[Launcher]:
    """Return the launchers that have ended, that no fault has hit, and that could know how the job ended."""
    last = max((trained.cycle for trained in job.trained), default=-1)
    found = []
    for launcher in job.launchers:
        # one that stood by in the last cycle can't know how it ended
        took_part = launcher.ranks is not None and launcher.ranks.cycle == last
        # nor one that couldn't reach the leader as long as that was there to tell it
        left_s = (launcher.ended_s or FOR_GOOD_S) - _BACK_S
        was_apart = any(cut_off(job, launcher, min(left_s, end.at_s), end.at_s + HOLDER_STAYS_S) for end in ends(job))
        was_hit = launcher.code is None or launcher.hurts or "stopped by" in launcher.left_by
        if not was_hit and ((took_part and not was_apart) or launcher.code != 94):
            found.append(launcher)
    return found


def survives_etcd(job: Job) -> Iterator[str]:
    """Require that a job whose etcd alone is away for a while, before no decision, loses no node."""
    kinds = {hurt.fault.kind for hurt in job.struck}
    away_s = sum(hurt.fault.seconds for hurt in job.struck)
    is_other = not kinds or not kinds <= {"etcd_away", "answers_lost"} or job.plan.rules.at_once
    if is_other or not job.made or job.plan.loss or away_s > _BEARABLE_S:
        return
    if len(cycles(job)) > 1 or {launcher.code for launcher in job.launchers if launcher.ranks is not None} != {0}:
        codes = sorted(str(launcher.code) for launcher in job.launchers)
        yield f"only etcd was away, and there are {len(cycles(job))} cycles; exit codes {codes}"
