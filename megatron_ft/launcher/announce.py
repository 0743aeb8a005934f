"""What the launcher tells of a cycle: the line for the user, and the record in its event log."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import WorkerGroup

from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.restart_policy import Decision, Outcome
from megatron_ft.launcher import lines
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node

__all__ = ["cause_of", "cycle_ended", "cycle_started", "log_end"]


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
    node.log.write(
        "cycle_started",
        cycle=record.cycle,
        ranks=[
            {"rank": record.global_ranks[local_rank], "local_rank": local_rank, "pid": worker.pid}
            for local_rank, worker in record.workers.items()
        ],
        group_rank=group.group_rank,
        world_size=world_size,
        max_restarts=node.line.namespace.max_restarts,
        restarts_left=restarts_left,
    )


def cause_of(outcome: Outcome, record: CycleRecord, *, nodes_waiting: int, asked_by: str | None) -> Cause:
    """Why a cycle ended that didn't succeed; ``asked_by`` is the signal that asked the launcher to stop."""
    if outcome is Outcome.FAILED:
        return record.cause()
    if outcome is Outcome.MEMBERSHIP:
        return Cause(kind=CauseKind.MEMBERSHIP, text=lines.nodes_waiting(nodes_waiting))
    if asked_by is not None:
        return Cause(kind=CauseKind.REQUEST, text=lines.stopped(asked_by, record.failures()))
    return record.request_cause()


def cycle_ended(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause) -> None:
    """A cycle has ended otherwise than well."""
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


def log_end(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause | None) -> None:
    """Only the record: the end of a cycle, good or bad."""
    node.log.write(
        "cycle_ended",
        cycle=record.cycle,
        outcome=outcome.value,
        cause=None if cause is None else {"rank": cause.rank, "kind": cause.kind.value, "text": cause.text},
        action=decision.action.value,
        iteration=record.last_iteration() if cause is None or cause.iteration is None else cause.iteration,
        restarts_left=decision.restarts_left,
    )
