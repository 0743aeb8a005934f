"""Records of the launcher's machine for the event log. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ft.core.agent.edge import HealthChecked, RanksMet, Write
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.control import ReceivedRequest
from megatron_ft.core.diagnosis.cycle_cause import Cause, CauseKind, HangVerdict, describe_hang
from megatron_ft.core.diagnosis.exits import RankExit, is_by_us
from megatron_ft.core.job.reports import Reviewed
from megatron_ft.core.job.restart_policy import Outcome, RestartDecision
from megatron_ft.core.process_facts import ProcessFacts
from megatron_ft.core.records import launcher as records
from megatron_ft.core.records.rank import LearnedTimeout, StateLoaded, TimeoutsLearned
from megatron_ft.core.records.shared import RankHung
from megatron_ft.core.timeouts.exchange import Learned
from megatron_ft.core.timeouts.learned import Choice, LearnedState


def node_health(event: HealthChecked) -> Write:
    record = records.NodeHealth(
        cycle=event.cycle,
        good=not event.ended,
        exit_code=event.code,
        text=event.ended,
        last_line=event.last_line,
        seconds=event.seconds,
    )
    return Write(record)


def cycle_started(record: CycleRecord, met: RanksMet, max_restarts: int, restarts_left: int) -> Write:
    ranks = tuple(
        records.StartedRank(rank=record.ranks[local_rank], local_rank=local_rank, pid=started.pid)
        for local_rank, started in record.started.items()
    )
    started = records.CycleStarted(
        cycle=record.cycle,
        ranks=ranks,
        group_rank=met.group_rank,
        world_size=met.world_size,
        max_restarts=max_restarts,
        restarts_left=restarts_left,
        met_ns=record.met_ns,
        spawned_ns=record.spawned_ns,
    )
    return Write(started)


def cycle_ended(
    record: CycleRecord, outcome: Outcome, decision: RestartDecision, cause: Cause | None, last_iteration: int | None
) -> Write:
    """Record the end of a cycle; no cause if it ended well."""
    why = None
    if cause is not None:
        why = records.Cause(
            rank=cause.rank, kind=cause.kind.value, text=cause.text, detail=cause.detail, host=cause.host
        )
    ended = records.CycleEnded(
        cycle=record.cycle,
        outcome=outcome.value,
        cause=why,
        action=decision.action.value,
        iteration=last_iteration if cause is None or cause.iteration is None else cause.iteration,
        restarts_left=decision.restarts_left,
    )
    return Write(ended)


def rank_exited(cycle: int, ended: RankExit) -> Write:
    exited = records.RankExited(
        cycle=cycle,
        rank=ended.rank,
        local_rank=ended.local_rank,
        pid=ended.pid,
        exitcode=ended.exitcode,
        signal=-ended.exitcode if ended.exitcode < 0 else None,
        by_us=is_by_us(ended),
        iteration=ended.iteration,
        error=ended.error,
    )
    return Write(exited, at_ns=ended.at_ns)


def late_rank(cycle: int, verdict: HangVerdict, *, pid: int, since_ns: int, observed_only: bool) -> Write:
    """Record the launcher's own verdict, like a monitor's."""
    record = RankHung(
        rank=verdict.rank,
        local_rank=verdict.local_rank,
        cycle=cycle,
        pid=pid,
        kind=verdict.kind,
        since_ns=since_ns,
        elapsed_s=verdict.elapsed_s,
        timeout_s=verdict.timeout_s,
        iteration=verdict.iteration,
        observed_only=observed_only,
        at_ns=verdict.at_ns,
        text=describe_hang(verdict),
    )
    return Write(record)


def would_have_ended(cycle: int, verdict: HangVerdict) -> Write:
    """Record a monitor's verdict without consequences."""
    record = records.WouldHaveEnded(
        rank=verdict.rank,
        local_rank=verdict.local_rank,
        cycle=cycle,
        iteration=verdict.iteration,
        text=describe_hang(verdict),
    )
    return Write(record)


def more_time(cycle: int, verdict: HangVerdict, until_s: float, progress: str) -> Write:
    """Record that a learned timeout was extended, because a rank makes progress."""
    record = records.MoreTime(
        rank=verdict.rank,
        local_rank=verdict.local_rank,
        cycle=cycle,
        kind=verdict.kind,
        section=verdict.section,
        iteration=verdict.iteration,
        elapsed_s=verdict.elapsed_s,
        timeout_s=verdict.timeout_s,
        until_s=until_s,
        progress=progress,
    )
    return Write(record)


def finding(cycle: int, cause: Cause) -> list[Write]:
    """Record the cause of a hang, by the evidence on all ranks. One launcher of the job logs it."""
    if cause.detail and cause.kind in (CauseKind.HANG, CauseKind.CRASH):
        return [Write(records.Finding(cycle=cycle, rank=cause.rank, text=cause.detail))]
    return []


def abandoned(text: str) -> Write:
    return Write(records.Abandoned(text=text))


def no_collective(cycle: int, review: Reviewed, *, ends: bool) -> Write:
    """Record that ranks without hooks complete no collective, with the evidence on all ranks."""
    record = records.NoCollective(
        cycle=cycle,
        rank=review.rank,
        elapsed_s=review.elapsed_s,
        timeout_s=review.timeout_s,
        text=review.text,
        ends=ends,
    )
    return Write(record)


def timeouts_learned(event: Learned, *, rule: str) -> Write:
    """Record learned timeouts that are enforced."""
    timeouts = {
        name: LearnedTimeout(
            timeout_s=each.timeout_s,
            previous_s=each.previous_s,
            max_observed_s=each.max_observed_s,
            rank_of_max=each.rank_of_max,
            margin_s=None if each.max_observed_s is None else each.timeout_s - each.max_observed_s,
            rule=rule,
            first_s=each.first_s,
        )
        for name, each in event.timeouts.items()
    }
    return Write(TimeoutsLearned(timeouts=timeouts))


def state_loaded(path: str, state: LearnedState, choice: Choice) -> Write:
    record = StateLoaded(
        path=path,
        timeouts=choice.timeouts,
        superseded=tuple(each.name for each in choice.superseded),
        world_size=state.world_size,
    )
    return Write(record)


def stuck(cycle: int, processes: Sequence[ProcessFacts]) -> Write:
    """Record processes of ranks that can't be killed, with the kernel functions they wait in."""
    return Write(records.Stuck(cycle=cycle, processes=tuple(processes)))


def request(asked: ReceivedRequest) -> Write:
    record = records.WorkloadControl(
        action=asked.action.name, description=asked.description, rank=asked.rank, pid=asked.pid
    )
    return Write(record)


def training_again(cycle: int, seconds: Mapping[str, float]) -> Write:
    """Record that all ranks of this node are through their first step; ``seconds`` by phase of the start."""
    return Write(records.TrainingAgain(cycle=cycle, seconds=dict(seconds)))
