"""What follows from the cycles so far: go on, restart, give up, finish. Pure: no clock, no process."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Action",
    "AnyFailed",
    "CycleEnd",
    "Decision",
    "GroupView",
    "MinHealthy",
    "NodeState",
    "Outcome",
    "RestartPolicy",
]


class NodeState(enum.Enum):
    """A node in a cycle, as all nodes know it; the values travel through the rendezvous's store."""

    HEALTHY = "healthy"
    """All its ranks run, or have ended with 0 and the others run."""
    SUCCEEDED = "succeeded"
    """All its ranks have ended with 0."""
    UNHEALTHY = "unhealthy"
    """A rank has failed; others may run."""
    LOST = "lost"
    """Its launcher isn't heard of any more."""
    EXCLUDED = "excluded"
    """One of its ranks asked for the node to be left out."""


class Outcome(enum.Enum):
    """How a cycle ended on this node; the values stand in the event log."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """Somebody asked for the end: a signal to the launcher, or a rank's request to shut the workload down."""
    MEMBERSHIP = "membership"
    """Nothing failed here: another node left its ranks, or one wants to join."""
    EXCLUDED = "excluded"
    """A rank of this node asked for the node to be left out: it leaves the job."""


class Action(enum.Enum):
    """What the launcher does next; the values stand in the event log."""

    RESTART = "restart"
    FINISH = "finish"
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True)
class CycleEnd:
    """One cycle that is over.

    Args:
        restarts_before: how many restarts the whole job had used before.
        nodes_left: how many nodes could take part in another cycle, those that wait to join included; None if
            no node was left out.
        stalled: for how many failed cycles in a row, this one included, the job has got no further.
        stuck: processes of this node's ranks that can't be ended, in words; empty if there are none.
    """

    cycle: int
    outcome: Outcome
    restarts_before: int = 0
    nodes_left: int | None = None
    stalled: int = 0
    stuck: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and how many restarts are left after it."""

    action: Action
    restarts_left: int
    reason: str
    """Why, for the end of the launcher's line; empty where the cause of the cycle's end says it all."""
    no_progress: bool = False
    """It gives up because another cycle would fail where the last ones did."""
    leaves: bool = False
    """Only this node gives up: the others restart, if they are enough."""


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """A running cycle as its launcher sees it: counts of this node's ranks, and of nodes that wait to join."""

    running: int
    succeeded: int
    failed: int
    nodes_waiting: int = 0

    @property
    def state(self) -> NodeState:
        """This node's state."""
        if self.failed:
            return NodeState.UNHEALTHY
        return NodeState.HEALTHY if self.running else NodeState.SUCCEEDED


class RestartPolicy(Protocol):
    """When a cycle is over, and what follows from it."""

    @property
    def min_nodes(self) -> int:
        """So many nodes a cycle needs."""
        ...

    @property
    def is_common(self) -> bool:
        """Whether ``judge_nodes`` alone counts where there are several nodes; else any of them may end the cycle."""
        ...

    def judge(self, view: GroupView) -> Outcome | None:
        """How the running cycle has ended for this node alone; None if it goes on."""
        ...

    def judge_nodes(self, nodes: Collection[NodeState]) -> Outcome | None:
        """How the running cycle has ended for all nodes; None if it goes on. Asked after each change of a state."""
        ...

    def judge_counts(self, nodes: Mapping[NodeState, int]) -> Outcome | None:
        """The same from how many nodes are in each state."""
        ...

    def decide(self, history: Sequence[CycleEnd]) -> Decision:
        """What follows from all cycles of this launcher, the last one just ended."""
        ...


@dataclass(frozen=True)
class AnyFailed:
    """All ranks of all nodes restart when any rank fails or a node is lost, at most ``max_restarts`` times.

    Membership changes cost nothing. A restart is counted once for the job, whichever node it began on.
    """

    max_restarts: int
    min_nodes: int = 1
    max_stalled: int = 0
    """So many failed cycles in a row may get no further than the job has been; 0 is any number."""
    is_common = False

    def judge(self, view: GroupView) -> Outcome | None:
        """See the protocol."""
        if view.failed:
            return Outcome.FAILED
        if not view.running:
            return Outcome.SUCCEEDED
        return Outcome.MEMBERSHIP if view.nodes_waiting else None

    def judge_nodes(self, nodes: Collection[NodeState]) -> Outcome | None:
        """See the protocol. The others' ranks would fail, too, but only when their collectives do."""
        return self.judge_counts(Counter(nodes))

    def judge_counts(self, nodes: Mapping[NodeState, int]) -> Outcome | None:
        """See the protocol."""
        if nodes.get(NodeState.UNHEALTHY) or nodes.get(NodeState.LOST):
            return Outcome.FAILED
        if nodes.get(NodeState.EXCLUDED):
            return Outcome.MEMBERSHIP
        return None if nodes.get(NodeState.HEALTHY) else Outcome.SUCCEEDED

    def decide(self, history: Sequence[CycleEnd]) -> Decision:
        """See the protocol."""
        assert history, "a decision needs a cycle that has ended"
        last = history[-1]
        # the job's count, for a launcher that came late; its own, where it can't ask the others
        used = max(
            last.restarts_before + (last.outcome is Outcome.FAILED),
            sum(end.outcome is Outcome.FAILED for end in history),
        )
        return _decide(last, self, used=used)


@dataclass(frozen=True)
class MinHealthy:
    """All ranks restart when fewer than ``min_nodes`` nodes are healthy or have succeeded.

    Until then nothing that happens to a node disturbs the others, or what is left of its own ranks. The job has
    succeeded when no node is healthy any more and ``min_nodes`` have succeeded. Restarts are counted once for
    the job, at most ``max_restarts``.
    """

    max_restarts: int
    min_nodes: int
    max_stalled: int = 0
    """As for ``AnyFailed``."""
    is_common = True

    def judge(self, view: GroupView) -> Outcome | None:
        """See the protocol: of a node that is alone."""
        return self.judge_nodes([view.state])

    def judge_nodes(self, nodes: Collection[NodeState]) -> Outcome | None:
        """See the protocol."""
        return self.judge_counts(Counter(nodes))

    def judge_counts(self, nodes: Mapping[NodeState, int]) -> Outcome | None:
        """See the protocol."""
        healthy, succeeded = nodes.get(NodeState.HEALTHY, 0), nodes.get(NodeState.SUCCEEDED, 0)
        if healthy + succeeded < self.min_nodes:
            return Outcome.FAILED
        return None if healthy else Outcome.SUCCEEDED

    def decide(self, history: Sequence[CycleEnd]) -> Decision:
        """See the protocol."""
        assert history, "a decision needs a cycle that has ended"
        last = history[-1]
        used = last.restarts_before + (last.outcome is Outcome.FAILED)
        return _decide(last, self, used=used)


def _decide(last: CycleEnd, policy: AnyFailed | MinHealthy, *, used: int) -> Decision:
    """``used`` restarts, if the one that may follow is made."""
    max_restarts, min_nodes = policy.max_restarts, policy.min_nodes
    left = max(0, max_restarts - used)
    too_few = last.nodes_left is not None and last.nodes_left < min_nodes
    match last.outcome:
        case Outcome.SUCCEEDED:
            return Decision(action=Action.FINISH, restarts_left=left, reason="")
        case Outcome.STOPPED:
            return Decision(action=Action.GIVE_UP, restarts_left=left, reason="not restarting")
        case Outcome.EXCLUDED:
            reason = "this node leaves the job"
            if too_few:
                reason += f", which ends: {last.nodes_left} of at least {min_nodes} nodes left"
            return Decision(action=Action.GIVE_UP, restarts_left=left, reason=reason)
        case _ if too_few and not last.stuck:
            reason = f"{last.nodes_left} of at least {min_nodes} nodes left, giving up"
            return Decision(action=Action.GIVE_UP, restarts_left=left, reason=reason)
        case Outcome.FAILED if 0 < policy.max_stalled <= last.stalled:
            cycles = "1 cycle" if last.stalled == 1 else f"{last.stalled} cycles"
            reason = f"no progress in {cycles}, giving up"
            return Decision(action=Action.GIVE_UP, restarts_left=left, reason=reason, no_progress=True)
        case Outcome.FAILED if used > max_restarts:
            reason = "no restarts left, giving up" if max_restarts else "no restarts allowed, giving up"
            return Decision(action=Action.GIVE_UP, restarts_left=0, reason=reason)
        case Outcome.MEMBERSHIP | Outcome.FAILED if last.stuck:
            # what they hold (devices, memory, ports) new ranks would need
            follows = "giving up" if last.nodes_left == 0 else "this node leaves the job"
            reason = f"{last.stuck} can't be ended, {follows}"
            return Decision(action=Action.GIVE_UP, restarts_left=left, reason=reason, leaves=last.nodes_left != 0)
        case Outcome.MEMBERSHIP | Outcome.FAILED:
            return Decision(action=Action.RESTART, restarts_left=left, reason="")
