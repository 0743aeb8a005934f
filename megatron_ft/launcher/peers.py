"""The other nodes of a running cycle, as the agent deals with them: tells them, hears of them, leaves with them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from megatron_ft.core import job_view
from megatron_ft.core.advance import Advance, Reached
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.job_view import JobView
from megatron_ft.core.restart_policy import NodeState, Outcome
from megatron_ft.core.silence import Silence
from megatron_ft.launcher import node_lines
from megatron_ft.launcher.doorbell import Doorbell
from megatron_ft.launcher.job_log import CUT_OFF_AFTER_S, CUT_OFF_ALONE_AFTER_S, JobLog
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.rounds import add_restart, write_advance

__all__ = ["CutOffError", "Peers"]

_LONGEST_LOOK_S = 2.0
_LAST_WORDS_S = 2.0
"""To tell the others something on the way out."""
_AGREE_S = 2.0
"""A node that has told the others why the cycle ends waits so long for its own words; then it ends it alone."""
_CAUSE_S = 0.3
_TOGETHER_S = 30.0
"""Beyond the time that ending ranks may take: how long the others are waited for at the end of the job."""


class CutOffError(FaultToleranceError):
    """The store of the rendezvous doesn't answer any more."""


class Peers:
    """One cycle's other nodes, and this one as they see it."""

    def __init__(
        self,
        node: Node,
        group: WorkerGroup,
        *,
        cycle: int,
        run_id: str,
        restarts_before: int,
        advance_before: Advance,
        reached: Callable[[], Reached],
        bell: Doorbell,
    ) -> None:
        """``reached`` is asked when this node tells the others that it has failed."""
        self.cycle = cycle
        self.restarts_before = restarts_before
        self.advance_before = advance_before
        self._reached = reached
        self.number: int = group.group_rank or 0
        self._node = node
        self._name = socket.gethostname()
        self._told = NodeState.HEALTHY
        self._asked_for_shutdown = False
        self._asked_to_end_s: float | None = None
        self._is_over = False
        self._is_stopped = False
        self._silence = Silence(_LONGEST_LOOK_S)
        policy, store = node.policy, group.store

        def decided(view: JobView) -> None:
            if view.outcome is Outcome.FAILED:
                add_restart(store, run_id=run_id, before=restarts_before)
                write_advance(store, run_id=run_id, advance=advance_before.after(view.reached))

        self._log = JobLog(
            store,
            prefix=f"megatron_ft/job/{cycle}",
            node=self.number,
            nodes=group.group_world_size or 1,
            name=self._name,
            interval_s=node.line.namespace.monitor_interval,
            judge=policy.judge_nodes,
            on_decided=decided,
            bell=bell,
        )
        self._seen = self._log.view
        node.reactor.watch(self._log.fileno(), self._changed)

    @property
    def view(self) -> JobView:
        """What all nodes know."""
        return self._log.view

    def blames_others(self) -> bool:
        """Whether the cycle was ended for all nodes, and this one was good: its ranks ended because it was ended."""
        return self.view.outcome is not None and self.view.nodes[self.number].state in node_lines.GOOD

    def check(self) -> None:
        """See that the others can be reached. Call it at least once a second or so.

        Raises:
            RendezvousConnectionError: the host of the rendezvous is gone, and the nodes only decide together.
            CutOffError: it doesn't answer.
        """
        if self._is_stopped:
            return
        is_common, error = self._node.policy.is_common, self._log.error
        if error is not None:
            if is_common:
                raise RendezvousConnectionError("The connection to the rendezvous has failed.") from error
            return  # who asks for nodes that wait hears it, too
        bound_s = CUT_OFF_AFTER_S if is_common else CUT_OFF_ALONE_AFTER_S
        if self._silence.look(self._log.last_answer_s, time.monotonic()) > bound_s:
            raise CutOffError(
                f"the rendezvous doesn't answer for {bound_s:g} s (the network, or its host?): "
                "this node gives up; others that reach it go on without this one"
            )

    def end_for_all(self, outcome: Outcome, *, cause: Callable[[], Cause], nodes_waiting: int) -> Outcome | None:
        """End the cycle on all nodes, because of what this node alone has seen: it ``FAILED``, or ``MEMBERSHIP``.

        ``view.outcome`` says when all know; then the first reason that somebody told is everybody's.

        Returns:
            ``outcome`` if the others can't be told, else None.
        """
        if self._asked_to_end_s is None:
            self._asked_to_end_s = time.monotonic()
            if outcome is Outcome.MEMBERSHIP:
                self._log.append(job_view.newcomers(self.number, count=nodes_waiting))
        if outcome is Outcome.FAILED:
            self.tell(NodeState.UNHEALTHY, cause)
        alone = self._log.error is not None or time.monotonic() - self._asked_to_end_s > _AGREE_S
        return outcome if alone else None

    def settle_cause(self, own: Callable[[], Cause | None]) -> None:
        """The cycle was ended because a rank had lost one of another node: hear why that one failed, if it is told.

        It may have been slower to end than the others to notice. ``own``: the failure of a rank of this node.
        """
        if not self.view.lacks_cause() or self._log.error is not None:
            return
        cause = own()
        if cause is not None:
            self._told = NodeState.HEALTHY  # what this node has told before was the consequence
            self.tell(NodeState.UNHEALTHY, lambda: cause)
        self._node.reactor.run_until(lambda: not self.view.lacks_cause(), deadline_s=time.monotonic() + _CAUSE_S)

    def cycle_is_over(self) -> None:
        """The nodes meet again: one that isn't heard of is soon found lost."""
        self._is_over = True
        self._log.cycle_is_over()

    def tell(self, state: NodeState, why: Callable[[], Cause | str]) -> None:
        """Tell the others of this node's state, once for each."""
        if state is self._told:
            return
        self._told = state
        cause = why()
        told: dict[str, Any] = {"text": cause}
        if isinstance(cause, Cause):
            told = {"text": cause.line, "kind": cause.kind.value, "rank": cause.rank, "follows": cause.follows}
        reached = self._reached() if state is NodeState.UNHEALTHY else None
        self._log.append(job_view.node_changed(self.number, state, name=self._name, reached=reached, **told))
        others = self.view.count(NodeState.HEALTHY) - 1
        if state is NodeState.SUCCEEDED and others > 0:
            self._node.say(node_lines.waiting_for_others(cycle=self.cycle, others=others))

    def hang_seen(self) -> None:
        """Let every node look at its ranks, because one of this node hangs. The first node to say so decides."""
        self._log.append(job_view.hang_seen(self.number))

    def publish(self, note: str) -> None:
        """Let the node that decides know what this one has seen."""
        self._log.publish(note)

    def gather(self) -> None:
        """Ask the other nodes for what they have seen."""
        self._log.gather()

    def stop_gathering(self) -> None:
        """What hasn't come by now isn't waited for."""
        self._log.stop_gathering()

    def notes(self) -> dict[int, str]:
        """What has come of it, by node."""
        return dict(self._log.notes)

    def hang_found(self, cause: Cause) -> None:
        """Tell all nodes who hangs."""
        self._log.append(
            job_view.hang_found(
                self.number,
                text=cause.text,
                rank=cause.rank,
                iteration=cause.iteration,
                detail=cause.detail,
                crashed=cause.kind is CauseKind.CRASH,
            )
        )

    def ask_for_shutdown(self, text: str) -> None:
        """Ask all nodes to end the job."""
        if not self._asked_for_shutdown:
            self._asked_for_shutdown = True
            self._log.append(job_view.shutdown_requested(self.number, name=self._name, text=text))

    def shutdown_text(self, *, wait_s: float = 0.0) -> str | None:
        """Who asked for the end of the job, in words; None if nobody did."""
        self._node.reactor.run_until(
            lambda: self.view.shutdown is not None or self._log.error is not None, deadline_s=time.monotonic() + wait_s
        )
        request = self.view.shutdown
        if request is None:
            return None
        if request.node == self.number:
            return request.text
        return node_lines.shut_down(number=request.node, name=request.name, text=request.text)

    def stop(self) -> None:
        """Hear of them no more; calling it again does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            self._node.reactor.unwatch(self._log.fileno())
            self._log.stop()

    def leave(self, *, together: bool) -> None:
        """The end of the job on this node. ``together``: on all nodes; they wait for each other.

        The store lives in the launcher of one of them, which must not end before all know what was decided.
        """
        node, log = self._node, self._log
        if self._is_stopped:
            return
        signalled = bool(node.signals.received)
        # ranks that ended with 0 did what they were asked to, together with the others, which are about to end, too
        if signalled and (node.policy.is_common or not node.ranks_ended_well):
            self.tell(NodeState.LOST, lambda: f"stopped by {node.signals.received[0].name}")
        log.append(job_view.gone(self.number))
        bound_s = _TOGETHER_S + 3 * node.line.stop_timeout if together and not signalled else _LAST_WORDS_S
        node.reactor.run_until(
            lambda: (
                log.error is not None
                or node.signals.ask_to_kill()
                or (log.is_written() and (not together or signalled or self.view.all_gone()))
            ),
            deadline_s=time.monotonic() + bound_s,
        )
        self.stop()

    def _changed(self) -> None:
        self._log.drain()
        before, view = self._seen, self._log.view
        self._seen = view
        for number, (old, new) in enumerate(zip(before.nodes, view.nodes, strict=True)):
            if old.state is new.state:
                continue
            self._log_state(number, new)
            if self._is_over and new.state is NodeState.LOST and number != self.number:
                left = len(view.nodes) - view.count(NodeState.LOST)
                are_enough = left >= self._node.policy.min_nodes
                self._node.say(node_lines.lost_between(number=number, report=new, are_enough=are_enough))
            elif self._node.policy.is_common and view.outcome is None and new.state not in node_lines.GOOD:
                self._node.say(
                    node_lines.node_changed(
                        cycle=self.cycle, number=number, view=view, min_nodes=self._node.policy.min_nodes
                    )
                )

    def _log_state(self, number: int, report: Any) -> None:
        self._node.log.write(
            "node_state", cycle=self.cycle, node=number, name=report.name, state=report.state.value, text=report.text
        )
