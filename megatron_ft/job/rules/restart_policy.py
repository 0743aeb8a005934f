"""When a cycle is over, and what follows: restart, give up, finish; and whether the job makes progress. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from megatron_ft.config.torchrun import JOIN_TIMEOUT_S
from megatron_ft.job.rules import job_lines
from megatron_ft.link.base.codec import Finite, Int, Message
from megatron_ft.link.base.rerun import Rerun
from megatron_ft.link.base.wording import counted

_T = TypeVar("_T")


class NodeState(enum.Enum):
    """A node in a cycle, as the coordinator knows it; the values stand in messages."""

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
    """The end was asked for: by a signal to the launcher, or by a rank's request to shut the workload down."""
    MEMBERSHIP = "membership"
    """No failure here: another node left its ranks, or one wants to join."""
    EXCLUDED = "excluded"
    """A rank of this node asked for the node to be left out: it leaves the job."""


class Action(enum.Enum):
    """Next act of the launcher; the values appear in the event log."""

    RESTART = "restart"
    FINISH = "finish"
    GIVE_UP = "give_up"


class Rotation(enum.Enum):
    """Processes that change places in the next cycle; the values appear in messages.

    A process keeps its place on the node: LOCAL_RANK, its GPU, its CPUs. Its RANK changes.
    """

    NONE = "none"
    RANKS = "ranks"
    """The ranks within each node: what shares a node's fast links, or a rail between nodes, still does."""
    NODES = "nodes"
    """The nodes: all their ranks run on other hosts."""


class RestartDecision(Message, frozen=True, kw_only=True):
    """Next act, and the restarts left after it."""

    action: Action
    restarts_left: Int
    reason: str
    """Why, for the end of the launcher's line; empty where the cause of the cycle's end says it all."""
    no_progress: bool = False
    """True if the job gives up because another cycle would fail where the last ones did."""
    change: str = ""
    """Change in the next cycle, for the launcher's line; empty without one."""


class Rules(Message, frozen=True):
    """Options common to the command lines of all launchers of a job; docs/restart-policies.md. Times are seconds.

    Args:
        max_stalled: failed cycles in a row that may make no progress; 0 is any number, also of failed starts.
        last_call_s: time for which a round is open for more nodes after there are enough; None: 30 s for the first
            one, 1 s for a later one that has lost a node or gained one.
        join_timeout_s: time for which a round waits for nodes that it needs.
        segment: nodes per NVLink domain in which they train; 0: in none.
        launchers: number of launchers started. Launchers that exit are not replaced. 0 if unknown.
        node_lost_s: silence after which a node is lost where nothing tells progress.
    """

    min_nodes: Int
    max_nodes: Int
    min_healthy: bool = False
    max_restarts: Int = 0
    max_stalled: Int = 0
    at_once: bool = False
    last_call_s: Finite | None = None
    join_timeout_s: Finite = JOIN_TIMEOUT_S
    launchers: Int = 0
    segment: Int = 0
    node_lost_s: Finite = 15.0

    def judge(self, nodes: Mapping[NodeState, int]) -> Outcome | None:
        """Return how the running cycle has ended, from the number of nodes in each state; None if it goes on."""
        healthy, succeeded = nodes.get(NodeState.HEALTHY, 0), nodes.get(NodeState.SUCCEEDED, 0)
        if self.min_healthy:
            has_failed = healthy + succeeded < self.min_nodes
        else:
            has_failed = bool(nodes.get(NodeState.UNHEALTHY) or nodes.get(NodeState.LOST))
        if has_failed:
            return Outcome.FAILED
        if nodes.get(NodeState.EXCLUDED) and not self.min_healthy:
            return Outcome.MEMBERSHIP
        return None if healthy else Outcome.SUCCEEDED

    def decide(
        self,
        outcome: Outcome,
        *,
        restarts_before: int = 0,
        nodes_left: int | None = None,
        advance: JobProgress,
        rerun: Rerun | None = None,
        restored: bool = False,
    ) -> RestartDecision:
        """Return the decision after a cycle that has just ended.

        Args:
            restarts_before: used by the whole job before.
            nodes_left: number of nodes that could take part in another cycle; None if no node was left out.
            advance: how far the job has got, this cycle included.
            rerun: what Megatron's rerun state machine ended the ranks for; None if something else did.
            restored: the cycle went on from a snapshot in memory, which may be to blame for the lack of progress.
        """
        used = restarts_before + (outcome is Outcome.FAILED)
        left = max(0, self.max_restarts - used)
        action, reason, no_progress = Action.GIVE_UP, "", False
        match outcome:
            case Outcome.SUCCEEDED:
                action = Action.FINISH
            case Outcome.STOPPED:
                reason = "not restarting"
            case Outcome.FAILED if rerun is Rerun.CONCLUDED:
                # the checkpoint holds the re-run: each cycle would end in the same way, whichever nodes take part
                no_progress = True
                reason = (
                    "not restarting, because the checkpoint repeats this re-run: the rank's log says 'Possible "
                    "persistent error' if the GPU is bad, else 'Correct result'; resume with --rerun-mode disabled, or "
                    "from an earlier checkpoint"
                )
            case _ if nodes_left is not None and nodes_left < self.min_nodes:
                reason = f"{job_lines.too_few_left(left=nodes_left, min_nodes=self.min_nodes)}, giving up"
            case Outcome.FAILED if 0 < self.max_stalled <= advance.stalled and not restored:
                no_progress = True
                cycles = f"no progress in {counted(advance.stalled, 'cycle')}, giving up"
                resumed = f", resumed after {advance.first}" if advance.first >= 0 else ""
                reason = f"{cycles} (none began an iteration after {advance.last}{resumed} or completed a save)"
            case Outcome.FAILED if self.max_stalled and advance.starts >= 2:  # the same mistake again
                no_progress = True
                reason = f"{advance.starts} starts in a row failed in this way before the first step, giving up"
            case Outcome.FAILED if used > self.max_restarts:
                reason = f"no restarts {'left' if self.max_restarts else 'allowed'}, giving up"
            case _:
                action = Action.RESTART
        return RestartDecision(action=action, restarts_left=left, reason=reason, no_progress=no_progress)


class Reached(NamedTuple):
    """How far one cycle got: the iteration that it went on from, and the last one it began; -1 where it had none."""

    first: int
    last: int
    trained: bool = True
    """A rank was through a section or an iteration, or may have been; False: all failed in their start."""
    start: str = ""
    """How the start failed, the same words for the same mistake; empty if another start may well get further."""
    saved: bool = False
    """A persistent save has ended."""


class JobProgress(Message, frozen=True):
    """How far the job has ever got, and for how many failed cycles in a row it has got no further.

    A cycle gets further if it begins an iteration beyond all before, resumes from a later one (a checkpoint was saved
    that none before had), or saves one itself: a job may count the iterations of each epoch from 0. To have resumed
    from a snapshot in memory (``restored``) is no progress. The first cycle known to have resumed without one, after
    cycles that had restored one, isn't counted: it may have resumed from a later checkpoint than those before.

    ``trained``: some cycle was through its start, or may have been. As long as none was, ``starts`` counts those in a
    row that failed in the same way, ``start``. A job that has trained fails at a start for reasons outside of it, too.
    """

    first: Int = -1
    last: Int = -1
    stalled: Int = 0
    trained: bool = False
    start: str = ""
    starts: Int = 0

    def after(self, reached: Reached | None, *, restored: bool = False, has_snapshot: bool = False) -> JobProgress:
        """After one more cycle that failed; None is one of which nothing is known.

        ``has_snapshot``: all its ranks have saved one in memory: it was through its start, whatever they have told.
        A job that has never reported an iteration isn't checked; a cycle without one is, in a job that had some before.
        """
        trained = self.trained or restored or has_snapshot or self.last >= 0 or reached is None or reached.trained
        start = "" if trained or reached is None else reached.start
        starts = 0 if not start else self.starts + 1 if start == self.start else 1
        first, last, stalled = self.first, self.last, self.stalled
        if reached is not None and max(last, reached.last) >= 0:
            first, last = first if restored else max(first, reached.first), max(last, reached.last)
            is_further = self.is_exceeded(reached) or first > self.first >= 0
            stalled = 0 if is_further else stalled + (first == self.first)
        return JobProgress(first, last, stalled, trained, start, starts)

    def is_exceeded(self, reached: Reached | None) -> bool:
        """Return True if a cycle is known to have begun an iteration beyond all before, or to have saved one."""
        return reached is not None and (reached.last > self.last or reached.saved)


def furthest(known: Iterable[JobProgress]) -> JobProgress:
    """Return the most advanced state: not all nodes need have seen the job's earlier lives."""
    return max(known, key=lambda each: (each.last, each.first, each.stalled, each.trained), default=JobProgress())


def rotated(items: Sequence[_T], by: int = 1, within: int = 0) -> list[_T]:
    """Return the items with each ``by`` places further to the front; the first ones follow the last.

    ``within``: size of the groups of neighbours in which they are; 0 or 1: all items are one group.
    """
    size = within if within > 1 else max(1, len(items))
    groups = [items[at : at + size] for at in range(0, len(items), size)]
    return [group[(at + by) % len(group)] for group in groups for at in range(len(group))]
