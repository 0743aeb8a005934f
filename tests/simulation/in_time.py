"""How long a job may take from a failure to its next cycle, or its end: by the times that are documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ft.job.rules.decisions import DecisionKind
from megatron_ft.job.rules.etcd_keys import LEASE_S
from megatron_ft.job.rules.job_cycle import RERUN_S
from megatron_ft.job.rules.liveness import FINISHED_S, STALLED_S, beat_s, lost_s
from megatron_ft.job.rules.nodes import NEW_LEADER_S
from tests.simulation.history import FOR_A_WHILE, RANK_FAULTS, STOPS, cycles, members

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher, Made

_SLACK_S = 2.0
"""Messages take up to 0.2 s, one after the other; ranks end, and nodes are checked."""
_MESSAGES = 12
"""One after the other: from a failure to the commit of the next cycle, or to where a new coordinator leads."""
_AGAIN_S = 3.0
"""A packet that is lost is sent again, and those after it wait."""
_HANG_S = 10.0
"""Evidence is collected for 2.3 s, and a rank that hangs has 6 s to end."""
_LAST_CALL_S = 1.0
_LOOKS_S = 7.0
"""A launcher looks at the key of the leader in etcd, and waits for an answer of etcd."""
_NOTICED_AT_ONCE = {*RANK_FAULTS, "launcher_killed", "dies_at_effect", "dies_last", "node_excluded", "newcomer"}
_HEALTH_RETRY_S = 60.0


def in_time(job: Job) -> Iterator[str]:
    """Require that the next cycle begins, or the job ends, within the documented times of a failure.

    They are counted from the last thing that happened: a fault, its end, a launcher or a coordinator that came or went.
    """
    for cycle in cycles(job):
        later = [made for made in job.made if made.decision.number > cycle.decision.number]
        follows = min(later, key=lambda made: made.at_s, default=None)
        until_s = _left_s(job, cycle) if follows is None else follows.at_s
        failed_s = _failed_s(job, cycle)
        if failed_s is None or until_s is None or until_s <= failed_s:
            continue
        since_s = max(failed_s, *(at_s for at_s in _moments(job) if at_s < until_s))
        bound_s = _bound_s(job, cycle, follows, until_s)
        if until_s - since_s > bound_s:
            what = "all had left" if follows is None else f"the next {follows.decision.kind.value} was decided"
            late = f"{until_s - since_s:.1f} s later, not {bound_s:.1f}"
            yield f"cycle {cycle.decision.cycle} failed at {failed_s:.1f} s, and {what} {late}"


def _left_s(job: Job, cycle: Made) -> float | None:
    """Return when the last of its launchers ended by itself; None if none did."""
    left = [launcher for launcher in members(job, cycle) if launcher is not None and launcher.code is not None]
    return max((launcher.ended_s for launcher in left if launcher.ended_s is not None), default=None)


def _failed_s(job: Job, cycle: Made) -> float | None:
    """Return when so many of its nodes had failed that it couldn't go on; None if they never had."""
    bad, rules = [_bad_s(launcher, cycle) for launcher in members(job, cycle) if launcher is not None], job.plan.rules
    times = sorted(at_s for at_s in bad if at_s is not None)
    spare = max(0, cycle.decision.world - rules.min_nodes) if rules.min_healthy else 0
    return max(times[spare], cycle.at_s) if len(times) > spare else None


def _bad_s(launcher: Launcher, cycle: Made) -> float | None:
    """Return when its ranks of that cycle failed, or died with their launcher, if they ever did."""
    failed = [hurt.from_s for hurt in launcher.hurts if hurt.cycle == cycle.decision.cycle]
    ran = [each for each in launcher.job.trained if each.launcher is launcher and each.cycle == cycle.decision.cycle]
    if launcher.code is None and launcher.ended_s is not None:
        was_over = ran and ran[-1].to_s is not None and ran[-1].to_s < launcher.ended_s
        failed += [] if was_over else [launcher.ended_s]
    return min(failed, default=None)


def _moments(job: Job) -> Iterator[float]:
    """Yield when something happened from outside."""
    for hurt in job.struck:
        yield hurt.from_s
        if hurt.fault.kind in FOR_A_WHILE:
            yield hurt.from_s + hurt.fault.seconds
    for launcher in job.launchers:
        yield launcher.started_s
        is_asked = any(hurt.fault.kind in STOPS for hurt in launcher.hurts)
        if launcher.ended_s is not None and (launcher.code is None or is_asked):
            yield launcher.ended_s
        if launcher.stays_since_s is not None:
            yield launcher.stays_since_s
    yield from (process.ended_s for process in job.coordinators if process.ended_s is not None)


def _bound_s(job: Job, cycle: Made, follows: Made | None, until_s: float) -> float:
    plan = job.plan
    rules, nodes = plan.rules, plan.nodes + plan.spares
    struck = {hurt.fault.kind for hurt in job.struck if hurt.from_s < until_s}
    ended = [each for each in job.coordinators if each.ended_s is not None and cycle.at_s <= each.ended_s < until_s]
    is_same = follows is not None and follows.by == cycle.by and not ended
    is_led = is_same and not {*FOR_A_WHILE, "connection_reset"} & struck
    longest_s = STALLED_S if plan.tells_progress else rules.node_lost_s
    silence_s = max(lost_s(nodes), longest_s) + beat_s(nodes) + 0.5
    again_s = _AGAIN_S if plan.loss else 0.0
    bound_s = (
        _SLACK_S
        + again_s
        + _MESSAGES * plan.latency_s
        + (_LAST_CALL_S if rules.last_call_s is None else rules.last_call_s)
    )
    # the silent node may have finished, too, as all others have: then the job has finished after a long wait
    if follows is not None and follows.decision.kind is DecisionKind.END and follows.decision.code == 0:
        bound_s += FINISHED_S
    bound_s += _HANG_S if "rank_hangs" in struck else 0.0
    # a rank that ends because another one's result was rejected is reported first, and that one is waited for
    bound_s += RERUN_S if {"ranks_rerun", "rerun_concluded"} & struck else 0.0
    if {"coordinator_frozen", "host_frozen"} & struck:  # to the coordinator, it was paused
        bound_s += silence_s
    if not is_led:  # a new leader waits for those that haven't come yet
        bound_s += silence_s + NEW_LEADER_S
    if plan.in_etcd and (not is_led or "answers_lost" in struck):
        bound_s += LEASE_S + _LOOKS_S
    # one whose end was lost on the way answers the next message with a reset, and may as well be back
    was_reset = any(cycle.at_s <= at_s < until_s for each in job.coordinators for at_s in each.resets)
    if not is_led or was_reset or struck - _NOTICED_AT_ONCE:
        bound_s += silence_s
    # nodes that are too few wait for others
    is_met = sum(_is_here(launcher, until_s) for launcher in job.launchers) >= rules.min_nodes
    return bound_s + (0.0 if is_met else rules.join_timeout_s)


def _is_here(launcher: Launcher, at_s: float) -> bool:
    """Return True if it can take part in a cycle that begins then, for sure."""
    is_alive = launcher.started_s < at_s and (launcher.ended_s is None or launcher.ended_s >= at_s)
    if not is_alive or launcher.stays_since_s is not None or launcher.member.decided is None:
        return False
    lasts = {
        hurt: hurt.until_s + (_HEALTH_RETRY_S if hurt.fault.kind == "node_ill" else 0.0) for hurt in launcher.hurts
    }
    return not any(hurt.from_s < hurt.until_s and hurt.from_s <= at_s <= to_s for hurt, to_s in lasts.items())
