"""Nodes that meet by a rendezvous of torch's own (``static``, ``etcd-v2``, a file): each coordinates only itself.

They meet anew for each cycle, and see that others have failed when their own ranks lose them, or when the rendezvous
says that nodes wait to join. Restarts are counted by each node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_ft.launcher.node import Node
from megatron_ft.launcher.static_rounds import StaticRounds

__all__ = ["TorchRounds"]


class TorchRounds:
    """``handler`` is torch's, or our rounds of its static one."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._asked_s = 0.0

    def cycle(self, own: int) -> int:
        """The number of the cycle that has just been met for; ``own`` is how many this launcher has begun before."""
        return self._handler.number if isinstance(self._handler, StaticRounds) else own

    def nodes_waiting(self, node: Node) -> int:
        """So many nodes wait for the ranks to be restarted; asked once in each ``--monitor-interval``."""
        if isinstance(self._handler, StaticRounds) or node.signals.received:
            return 0
        interval_s = float(node.line.namespace.monitor_interval)
        if time.monotonic() < self._asked_s + interval_s:
            return 0
        self._asked_s = time.monotonic()
        return int(node.blocking(self._handler.num_nodes_waiting))

    def wait_for_the_others(self, node: Node, barrier: Callable[[], None]) -> None:
        """torch's barrier at the end: the store of the ranks lives in one of the launchers."""
        try:
            node.blocking(barrier)
        except RendezvousError:
            pass  # the others are gone: what is done is done
