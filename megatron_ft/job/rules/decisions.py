"""Decisions of the leader of a job, one after the other: a cycle starts, or the job ends. Pure."""

from __future__ import annotations

import enum

from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.link.base.codec import NO_PARTS, Int, Message, Parts


class DecisionKind(enum.Enum):
    """Kind of a decision."""

    START = "start"
    """These nodes train together, in this order."""
    END = "end"
    """The job ends."""


class Decision(Message, frozen=True):
    """Each node knows its own place, and needs no other's.

    Args:
        number: of decisions, from 0.
        id: tells the decision from one of the same number that a leader without a record has made.
        world: number of nodes in ``cycle``; their places are 0 to ``world - 1``.
        restarts: used by the job before this cycle began.
        code: for the end: the launchers' exit code, with the reason in ``text``.
        printer: for the end: the launcher (instance) that prints why.
        founding: id of the job's first decision, which tells two lives of one job apart.
        back: names of nodes that were lost once, and are ready for this cycle.
        shift: places by which the ranks of each node are rotated: the process with LOCAL_RANK i runs the rank that
            the one with i + shift would run otherwise.
        attachments: what parts of the leader tell the same parts of launchers about ``cycle``.
    """

    number: Int
    id: str
    kind: DecisionKind
    cycle: Int
    world: Int
    restarts: Int = 0
    advance: JobProgress = JobProgress()
    code: Int = 0
    text: str = ""
    printer: str = ""
    founding: str = ""
    back: tuple[str, ...] = ()
    shift: Int = 0
    attachments: Parts = NO_PARTS


class Assignment(Message, frozen=True):
    """A decision as one node has it. ``place`` is None for a node that doesn't take part.

    ``store``: the store in which the ranks of the cycle meet.
    """

    decision: Decision
    place: Int | None = None
    store: str = ""


class DecisionRecord(Message, frozen=True):
    """Last decision, for the next leader.

    ``instances`` and ``names`` are those of the cycle's launchers, by place. ``revision``: that of etcd's store when it
    was made, if a leader has found it there: the decision may be one of an earlier run.
    """

    decision: Decision
    store: str = ""
    instances: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    revision: Int = 0
