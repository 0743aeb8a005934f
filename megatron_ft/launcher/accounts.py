"""What the job has used and reached, cycle by cycle, and what the policy makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron_ft.core.advance import Advance
from megatron_ft.core.restart_policy import Action, CycleEnd, Decision, NodeState, Outcome
from megatron_ft.ipc.proc_facts import process_facts
from megatron_ft.launcher import lines
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import Peers

__all__ = ["Accounts"]


class Accounts:
    """Of one launcher. Where there are other nodes, the numbers are the job's."""

    def __init__(self, node: Node, nodes_waiting: Callable[[], int]) -> None:
        """``nodes_waiting`` asks the rendezvous, which may take a while."""
        self._node = node
        self._nodes_waiting = nodes_waiting
        self._history: list[CycleEnd] = []
        self._advance = Advance()

    @property
    def cycles(self) -> int:
        """So many have ended."""
        return len(self._history)

    def close(self, record: CycleRecord, outcome: Outcome, peers: Peers | None) -> Decision:
        """A cycle has ended: what follows."""
        end = self._end(record, outcome, peers)
        self._history.append(end)
        decision, received = self._node.policy.decide(self._history), self._node.signals.received
        if decision.action is Action.RESTART and received:
            self._node.tell_asked_to_stop(ranks=0)
            return dataclasses.replace(decision, action=Action.GIVE_UP, reason="not restarting")
        return decision

    def last(self) -> CycleEnd:
        """The one that ended last."""
        return self._history[-1]

    def _end(self, record: CycleRecord, outcome: Outcome, peers: Peers | None) -> CycleEnd:
        left: int | None = None
        stuck = [] if outcome is Outcome.SUCCEEDED else self._node.ending.still_there(record.workers.values())
        if stuck:
            self._node.log.write(
                "stuck", cycle=record.cycle, processes=[{"pid": stat.pid, **process_facts(stat.pid)} for stat in stuck]
            )
        advance, reached = self._advance, peers.view.reached if peers is not None else record.reached()
        if peers is None:
            before = sum(end.outcome is Outcome.FAILED for end in self._history)
            left = 0 if outcome is Outcome.EXCLUDED or stuck else None
        else:
            before = peers.restarts_before
            # our own exclusion may not have come back from the store yet
            excluded = max(peers.view.count(NodeState.EXCLUDED), int(outcome is Outcome.EXCLUDED))
            if excluded:
                left = len(peers.view.nodes) - excluded + self._nodes_waiting()
            advance = peers.advance_before
        self._advance = advance.after(reached) if outcome is Outcome.FAILED else advance
        return CycleEnd(
            cycle=record.cycle,
            outcome=outcome,
            restarts_before=before,
            nodes_left=left,
            stalled=self._advance.stalled,
            stuck=lines.stuck(stuck) if stuck else "",
        )
