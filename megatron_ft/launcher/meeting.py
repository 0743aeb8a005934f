"""Meeting the other nodes for the next cycle: at once, without those that are lost, and saying for whom it waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from megatron_ft.core.advance import Advance
from megatron_ft.core.gathering import Gathering, Seen, Verdict
from megatron_ft.core.restart_policy import NodeState
from megatron_ft.launcher import node_lines, torch_private, torch_rendezvous
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import Peers
from megatron_ft.launcher.reactor import Timer
from megatron_ft.launcher.rounds import agree_on_cycle, read_advance, restarts_used
from megatron_ft.launcher.static_rounds import StaticRounds
from megatron_ft.launcher.torch_rendezvous import Pace

__all__ = ["Meetings", "Met"]

_TELL_AFTER_S = 3.0
_TELL_AGAIN_FACTOR = 10.0


@dataclass(frozen=True)
class Met:
    """What the nodes agree on: the number of the cycle, the restarts that the job has used, and how far it has got."""

    cycle: int
    restarts_used: int
    advance: Advance


class Meetings:
    """All rounds of the rendezvous of one launcher."""

    def __init__(self, node: Node, handler: Any) -> None:
        self._node = node
        self._handler = handler
        line = node.line
        self._pace = Pace(
            nodes=line.max_nodes,
            ends_last_call=not line.configures_rendezvous("last_call_timeout"),
            removes_dead=not line.configures_rendezvous("keep_alive_interval", "keep_alive_max_attempt"),
        )
        self._count = 0
        self._last_cycle: int | None = None
        self._last_number: int | None = None
        self._last_round: dict[Any, int] = {}
        self._seen: Seen | None = None
        self._timer: Timer | None = None

    @property
    def nodes(self) -> Collection[Any]:
        """Of the round that was met last, by what the rendezvous knows them by."""
        return self._last_round

    @property
    def count(self) -> int:
        """So many rounds were met."""
        return self._count

    def forget(self) -> None:
        """This node stands aside: what it knows of the last round says nothing about the next one it takes part in."""
        self._last_round, self._last_number = {}, None

    def cycle_is_over(self, peers: Peers | None) -> None:
        """For this node, that is."""
        if peers is None:
            return
        peers.cycle_is_over()
        if self._node.policy.is_common and peers.view.nodes[peers.number].state is NodeState.LOST:
            # the others go on with it, in the same round, and not at the pace of nodes that meet
            peers.stop()
            self.forget()

    def stands_by(self) -> bool:
        """Whether a cycle runs without this node, as far as it was seen."""
        return self._seen is not None and self._seen.stands_by(self._last_number)

    def meet(
        self,
        rendezvous: Callable[[WorkerGroup], None],
        group: WorkerGroup,
        *,
        peers: Peers | None,
        check: Callable[[], None],
    ) -> Met:
        """Wait for the others, and serve everything else meanwhile; ``check`` is called after each event.

        ``rendezvous`` is torch's, ``peers`` are those of the last cycle.

        Raises:
            RendezvousError: they can't meet.
            whatever ``check`` raises.
        """
        self._warn(torch_rendezvous.fresh_store(self._handler, nodes=self._node.line.max_nodes))
        self._warn(torch_rendezvous.slow_because(self._handler))
        gathering = Gathering(
            last_round=self._last_round,
            last_number=self._last_number,
            min_nodes=self._node.policy.min_nodes,
            max_nodes=self._node.line.max_nodes,
        )
        self._seen = None
        self._tell_in(_TELL_AFTER_S, gathering, peers)

        def look() -> None:
            if peers is not None and self.stands_by():
                peers.stop()  # they tell each other elsewhere now, and would seem lost
            check()

        try:
            met = self._node.reactor.call_blocking(lambda: self._meet(rendezvous, group, gathering, peers), look)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        torch_private.warn_of_no_lost_connections()  # until now they say why a host can't be reached
        self._count += 1
        self._last_cycle = met.cycle
        return met

    def _meet(
        self,
        rendezvous: Callable[[WorkerGroup], None],
        group: WorkerGroup,
        gathering: Gathering,
        peers: Peers | None,
    ) -> Met:
        """In a thread of its own."""
        stood_by_s = -math.inf

        def look(seen: Seen) -> Verdict:
            nonlocal stood_by_s
            self._seen = seen
            if self.stands_by():
                stood_by_s = time.monotonic()
            return gathering.look(seen, absent=_absent(peers), now_s=time.monotonic())

        while True:
            try:
                with torch_rendezvous.quick_round(self._handler, pace=self._pace, look=look):
                    rendezvous(group)
                break
            except RendezvousTimeoutError:
                waited_s = time.monotonic() - stood_by_s
                if waited_s > torch_rendezvous.join_timeout_s(self._handler):
                    raise
                # torch's time to join is for nodes that are missing. It runs while this node stands by, too, for weeks
                # maybe, and may end when the next round has just begun: that would close the rendezvous for all.
        self._last_number, nodes = torch_rendezvous.last_round(self._handler)
        self._last_round = dict(nodes)
        run_id, several = self._handler.get_run_id(), self._node.line.max_nodes > 1
        used = restarts_used(group.store, run_id=run_id) if several else 0
        cycle = agree_on_cycle(
            group.store,
            has_rounds=torch_rendezvous.has_rounds(self._handler),
            run_id=run_id,
            group_rank=group.group_rank or 0,
            own_count=self._count,
        )
        return Met(cycle, used, read_advance(group.store, run_id=run_id) if several else Advance())

    def _tell_in(self, seconds: float, gathering: Gathering, peers: Peers | None) -> None:
        """Say for whom the round waits; again after ten times as long."""

        def tell() -> None:
            self._node.say(self._told(gathering, peers))
            self._tell_in(seconds * (_TELL_AGAIN_FACTOR - 1), gathering, peers)

        self._timer = self._node.reactor.call_later(seconds, tell)

    def _told(self, gathering: Gathering, peers: Peers | None) -> str:
        seen, min_nodes = self._seen, self._node.policy.min_nodes
        if isinstance(self._handler, StaticRounds):
            return self._handler.waits_for()
        if seen is None:
            return node_lines.waiting_for_nodes(here=[], more=min_nodes)
        is_last = seen.round == self._last_number
        if self.stands_by():
            return node_lines.standing_by(len(seen.participants))
        absent = _absent(peers)
        missing = gathering.missing(seen, absent=absent)
        lost = [node for node in gathering.missing(seen) if node not in missing]
        here = sorted(map(torch_rendezvous.address_of, seen.waiting | (frozenset() if is_last else seen.participants)))
        return node_lines.waiting_for_nodes(
            here=here,
            more=max(min_nodes - len(here), len(missing), 0),
            missing=[torch_rendezvous.address_of(node) for node in missing],
            lost=[torch_rendezvous.address_of(node) for node in lost],
            cycle=self._last_cycle,
        )

    def _warn(self, text: str | None) -> None:
        if text is not None and not self._count:
            self._node.say(text)


def _absent(peers: Peers | None) -> frozenset[int]:
    """Nodes of the last cycle that won't come, by group rank."""
    if peers is None:
        return frozenset()
    view = peers.view
    lost = {number for number, report in enumerate(view.nodes) if report.state is NodeState.LOST}
    return view.gone | lost
