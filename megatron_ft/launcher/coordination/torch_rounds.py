"""Nodes that meet by a rendezvous of torch's own (``static``, ``etcd-v2``, a file): each coordinates only itself.

They meet anew for each cycle, and see that others have failed when their own ranks lose them, or when the rendezvous
says that nodes wait to join. Restarts are counted by each node.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from megatron_ft.ipc.net.tcp import parse_address
from megatron_ft.launcher.base.event_loop import THREAD_PREFIX
from megatron_ft.launcher.coordination import static_rounds
from megatron_ft.launcher.coordination.rank_store import RankStore
from megatron_ft.launcher.coordination.rendezvous import CoordinatedRendezvous
from megatron_ft.launcher.coordination.static_rounds import StaticRounds

__all__ = ["OtherRounds", "TorchRounds", "in_rounds"]

_KEY = "megatron_ft/round"


def in_rounds(handler: Any) -> Any:
    """A rendezvous with numbered rounds, and a fresh store for the ranks of each; the coordinator's has them."""
    if isinstance(handler, CoordinatedRendezvous):
        return handler
    return static_rounds.in_rounds(handler) if handler.get_backend() == "static" else OtherRounds(handler)


class OtherRounds(RendezvousHandler):
    """The rounds of a rendezvous that gives each of them a store of its own, in which its nodes agree on the rest.

    torch keeps one store for the ranks of all cycles, in which they would find addresses of dead ranks.
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._ranks_store: RankStore | None = None
        self.number = -1
        """Of the last round, from 0: one more than any of its nodes has seen."""

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in a store of node 0's launcher."""
        return True

    def get_backend(self) -> str:
        """As torch names it."""
        return str(self._handler.get_backend())

    def get_run_id(self) -> str:
        """torchrun's --rdzv-id."""
        return str(self._handler.get_run_id())

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, and have node 0 say where the ranks meet, and in which cycle.

        Raises:
            RendezvousError: the others don't come.
            RuntimeError: the store of the round can't be reached.
        """
        if self._ranks_store is not None:
            self._ranks_store.close()
        met = self._handler.next_rendezvous()
        store, nodes = met.store, range(met.world_size)
        store.set(f"{_KEY}/{met.rank}", str(self.number))
        if met.rank == 0:
            number = 1 + max(map(int, store.multi_get([f"{_KEY}/{node}" for node in nodes])))
            # what torch would tell the others: how they reach this node
            address = None if met.bootstrap_store_info is None else met.bootstrap_store_info.master_addr
            self._ranks_store = RankStore(address or socket.getfqdn())
            store.set(_KEY, json.dumps([number, self._ranks_store.open()]))
        self.number, address = json.loads(store.get(_KEY))
        return RendezvousInfo(store, met.rank, met.world_size, RendezvousStoreInfo(*parse_address(address)))

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed to all nodes."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous: no node can join any more."""
        self._handler.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """So many wait for the next round."""
        return self._handler.num_nodes_waiting()

    def shutdown(self) -> bool:
        """Leave it."""
        if self._ranks_store is not None:
            self._ranks_store.close()
        return self._handler.shutdown()


class TorchRounds:
    """``handler`` is one of `in_rounds`."""

    def __init__(self, handler: RendezvousHandler) -> None:
        assert isinstance(handler, (StaticRounds, OtherRounds))
        self._handler = handler
        self._asked_s = 0.0
        self._question: _Question | None = None

    @property
    def cycle(self) -> int:
        """The number of the cycle that was met for last."""
        return self._handler.number

    def poll_nodes_waiting(self, every_s: float) -> int:
        """How many nodes wait to join, by the last answer; asked in a thread each ``every_s`` seconds.

        Raises:
            whatever the rendezvous has raised.
        """
        if isinstance(self._handler, StaticRounds):
            return 0
        question, now_s = self._question, time.monotonic()
        if question is None:
            if now_s >= self._asked_s + every_s:
                self._asked_s, self._question = now_s, _Question(self._handler.num_nodes_waiting)
            return 0
        if question.thread.is_alive():
            return 0
        self._question = None
        if question.error is not None:
            raise question.error
        return question.answer

    def in_turn(self, rendezvous: Callable[[WorkerGroup], None]) -> Callable[[WorkerGroup], None]:
        """``rendezvous`` once a question that is under way has been answered, which tells of the last round only.

        torch's handlers serve one caller at a time.
        """

        def meet(group: WorkerGroup) -> None:
            question, self._question = self._question, None
            if question is not None:
                question.thread.join()
            rendezvous(group)

        return meet

    def wait_for_the_others(self, barrier: Callable[[], None]) -> None:
        """torch's barrier at the end: the store of the ranks lives in one of the launchers."""
        try:
            barrier()
        except RendezvousError:
            pass  # the others are gone: what is done is done


class _Question:
    """To a rendezvous that may be slow to answer, or never does."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.answer = 0
        self.error: Exception | None = None
        self._ask = ask
        self.thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}membership", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.answer = int(self._ask())
        except Exception as error:  # noqa: BLE001 - handed to the launcher's thread, whatever it is
            self.error = error
