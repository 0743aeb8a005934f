"""What the launcher tells of a cycle: the line for the user, and the record in its event log."""

from __future__ import annotations

import itertools
import time

from torch.distributed.elastic.agent.server.api import WorkerGroup

from megatron_ft.core.diagnosis.exits import Cause, CauseKind
from megatron_ft.core.job.restart_policy import Decision, Outcome
from megatron_ft.core.records import launcher as records
from megatron_ft.ipc.linux.proc import process_facts
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node

__all__ = [
    "cycle_ended",
    "cycle_started",
    "finding",
    "log_end",
    "log_request",
    "stuck",
    "training_again",
]


def cycle_started(node: Node, record: CycleRecord, group: WorkerGroup, restarts_left: int) -> None:
    """The ranks of a cycle were created."""
    world_size = group.workers[0].world_size
    node.say(
        lines.cycle_started(
            cycle=record.cycle,
            world_size=world_size,
            local_ranks=record.global_ranks,
            nodes=group.group_world_size or 1,
        )
    )
    started = records.CycleStarted(
        cycle=record.cycle,
        ranks=tuple(
            records.StartedRank(rank=record.global_ranks[local_rank], local_rank=local_rank, pid=worker.pid)
            for local_rank, worker in record.workers.items()
        ),
        group_rank=group.group_rank,
        world_size=world_size,
        max_restarts=node.line.namespace.max_restarts,
        restarts_left=restarts_left,
        met_ns=record.met_ns,
        spawned_ns=record.spawned_ns,
    )
    node.log.write(started)
    nodes = group.group_world_size or 1
    node.status.cycle_started(record, nodes=nodes, world_size=world_size or 0, restarts_left=restarts_left)


def training_again(node: Node, record: CycleRecord) -> None:
    """Say so once all ranks of this node are through their first step, and where the time since the end went."""
    if node.failure_ns is None:
        return
    noticed_ns, stopped_ns = node.failure_ns
    phases = record.phases_ns()
    if phases is None or record.met_ns < stopped_ns:
        return  # not yet; or it is the cycle that failed, of which something is still heard
    node.failure_ns = None
    moments = {"stop": stopped_ns, **phases}
    durations = dict(zip(moments, (b - a for a, b in itertools.pairwise([noticed_ns, *moments.values()])), strict=True))
    seconds = {name: duration / 1e9 for name, duration in durations.items()}
    node.say(lines.training_again(cycle=record.cycle, seconds=seconds))
    node.log.write(records.TrainingAgain(cycle=record.cycle, seconds=seconds))


def cycle_ended(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause) -> None:
    """A cycle has ended otherwise than well."""
    node.failure_ns = (record.noticed_ns(), time.monotonic_ns())
    if node.cycle_info is not None:
        node.cycle_info.ended()
    node.say(
        lines.cycle_ended(
            cycle=record.cycle,
            cause=cause,
            decision=decision,
            outcome=outcome,
            max_restarts=node.line.namespace.max_restarts,
        )
    )
    log_end(node, record, outcome, decision, cause)


def finding(node: Node, record: CycleRecord, cause: Cause) -> None:
    """All ranks were looked at because one hung: who it was. One launcher of the job logs it."""
    if cause.detail and cause.kind in (CauseKind.HANG, CauseKind.CRASH):
        node.log.write(records.Finding(cycle=record.cycle, rank=cause.rank, text=cause.detail))


def stuck(node: Node, record: CycleRecord) -> str:
    """Processes of the ranks that can't be ended, in words; empty if there are none. The log has what they wait in."""
    there = node.ending.still_there(record.workers.values())
    if not there:
        return ""
    told = tuple({"pid": stat.pid, **process_facts(stat.pid)} for stat in there)
    node.log.write(records.Stuck(cycle=record.cycle, processes=told))
    return lines.stuck(there)


def log_request(node: Node, request: ReceivedRequest) -> None:
    """A rank asked for something."""
    asked = records.WorkloadControl(
        action=request.action.name,
        description=request.description,
        rank=request.rank,
        pid=request.pid,
    )
    node.log.write(asked)


def log_end(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause | None) -> None:
    """Only the record: the end of a cycle, good or bad."""
    node.status.cycle_ended(record, decision, cause)
    why = (
        None
        if cause is None
        else records.Cause(rank=cause.rank, kind=cause.kind.value, text=cause.text, detail=cause.detail)
    )
    ended = records.CycleEnded(
        cycle=record.cycle,
        outcome=outcome.value,
        cause=why,
        action=decision.action.value,
        iteration=record.last_iteration() if cause is None or cause.iteration is None else cause.iteration,
        restarts_left=decision.restarts_left,
    )
    node.log.write(ended)
