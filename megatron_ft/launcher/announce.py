"""What the launcher tells of a cycle: the line for the user, and the record in its event log."""

from __future__ import annotations

import itertools
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.restart_policy import Decision, NodeState, Outcome
from megatron_ft.launcher import lines, node_lines, torch_rendezvous
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import Peers

__all__ = [
    "cause_of",
    "cycle_ended",
    "cycle_started",
    "found_by",
    "log_end",
    "log_request",
    "standing_by",
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
        met_ns=record.met_ns,
        spawned_ns=record.spawned_ns,
    )
    nodes = group.group_world_size or 1
    node.status.cycle_started(record, nodes=nodes, world_size=world_size or 0, restarts_left=restarts_left)


def standing_by(node: Node, nodes: list[Any]) -> None:
    """Nodes wait, and the cycle goes on without them."""
    names = [torch_rendezvous.address_of(each) for each in nodes]
    node.say(node_lines.others_stand_by(names))
    node.log.write("standing_by", nodes=names)


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
    node.log.write("training_again", cycle=record.cycle, seconds=seconds)


def cause_of(
    outcome: Outcome,
    record: CycleRecord,
    *,
    nodes_waiting: int,
    asked_by: str | None,
    peers: Peers | None,
    min_nodes: int,
    is_common: bool,
) -> Cause:
    """Why a cycle ended that didn't succeed.

    ``asked_by`` is the signal that asked the launcher to stop; ``is_common`` as the policy has it.
    """
    view = None if peers is None else peers.view
    if outcome is Outcome.FAILED and peers is not None and not is_common:
        peers.settle_cause(record.own_failure)
        return found_by(peers) or _first_told(peers) or record.cause()
    if outcome is Outcome.FAILED:
        if view is None or view.outcome is not Outcome.FAILED or len(view.nodes) == 1:
            return record.cause()
        own = record.cause() if record.failures() else None
        text = node_lines.too_few_healthy(view=view, min_nodes=min_nodes)
        kind = CauseKind.MEMBERSHIP if own is None else own.kind
        return Cause(kind=kind, text=text, rank=None if own is None else own.rank)
    if outcome is Outcome.MEMBERSHIP:
        told = 0 if view is None else view.newcomers
        return Cause(kind=CauseKind.MEMBERSHIP, text=_membership(peers) or lines.nodes_waiting(told or nodes_waiting))
    if asked_by is not None:
        return Cause(kind=CauseKind.REQUEST, text=lines.stopped(asked_by, record.failures()))
    if outcome is Outcome.STOPPED and record.shutdown_request is None and peers is not None:
        return Cause(kind=CauseKind.REQUEST, text=peers.shutdown_text() or "another node asked for the end")
    return record.request_cause()


def found_by(peers: Peers) -> Cause | None:
    """Who hangs, as the node has decided that looked at all ranks; None where nobody has."""
    found = peers.view.finding
    if found is None:
        return None
    return Cause(
        kind=CauseKind.CRASH if found["crashed"] else CauseKind.HANG,
        text=found["text"],
        rank=found["rank"],
        iteration=found["iteration"],
        detail=found["detail"],
    )


def _first_told(peers: Peers) -> Cause | None:
    """What ended the cycle on another node; None if that was a rank of this one."""
    view = peers.view
    number = view.first_failure()
    if view.outcome is not Outcome.FAILED or number is None:
        return None
    report = view.nodes[number]
    if number == peers.number:
        own = node_lines.lost_sight(report.text) if report.state is NodeState.LOST else None
        return None if own is None else Cause(kind=CauseKind.MEMBERSHIP, text=own)
    kind = CauseKind(report.kind) if report.kind else CauseKind.MEMBERSHIP
    return Cause(kind=kind, text=node_lines.failed(number=number, report=report), rank=report.rank)


def _membership(peers: Peers | None) -> str | None:
    """What another node has to do with it; None if that is only that it waits to join."""
    if peers is None:
        return None
    own = peers.view.nodes[peers.number]
    return node_lines.lost_sight(own.text) if own.state is NodeState.LOST else node_lines.excluded(peers.view)


def cycle_ended(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause) -> None:
    """A cycle has ended otherwise than well."""
    node.failure_ns = (record.noticed_ns(), time.monotonic_ns())
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


def log_request(node: Node, request: ReceivedRequest) -> None:
    """A rank asked for something."""
    node.log.write(
        "workload_control",
        action=request.action.name,
        description=request.description,
        rank=request.rank,
        pid=request.pid,
    )


def log_end(node: Node, record: CycleRecord, outcome: Outcome, decision: Decision, cause: Cause | None) -> None:
    """Only the record: the end of a cycle, good or bad."""
    node.status.cycle_ended(record, decision, cause)
    node.log.write(
        "cycle_ended",
        cycle=record.cycle,
        outcome=outcome.value,
        cause=None
        if cause is None
        else {"rank": cause.rank, "kind": cause.kind.value, "text": cause.text, "detail": cause.detail},
        action=decision.action.value,
        iteration=record.last_iteration() if cause is None or cause.iteration is None else cause.iteration,
        restarts_left=decision.restarts_left,
    )
