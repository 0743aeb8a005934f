"""Nodes that meet by a rendezvous of torch's own (``static``, ``etcd-v2``, a file): each coordinates only itself.

They meet anew for each cycle, and see that others have failed when their own ranks lose them, or when the rendezvous
says that nodes wait to join. Restarts are counted by each node.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_ft.ipc.net.tcp import parse_address
from megatron_ft.launcher.base.event_loop import THREAD_PREFIX
from megatron_ft.launcher.coordination.rank_store import RankStore
from megatron_ft.launcher.coordination.rendezvous import CoordinatedRendezvous

_KEY = "megatron_ft/round"
_PREFIX = "megatron_ft/static"
_INTERVAL_S = 0.05
_S_PER_NODE = 0.001
"""One store serves all nodes: with many of them each asks less often."""
_ALIVE_INTERVALS = 20
_SHOWN = 20


def in_rounds(handler: Any) -> Any:
    """A rendezvous with numbered rounds, and a fresh store for the ranks of each; the coordinator's has them.

    A static rendezvous of one node is returned as it is.
    """
    if isinstance(handler, CoordinatedRendezvous):
        return handler
    if handler.get_backend() != "static":
        return OtherRounds(handler)
    return StaticRounds(handler) if isinstance(handler, StaticTCPRendezvous) and handler.world_size > 1 else handler


def let_rounds_name_the_store(spec: Any) -> None:
    """The ranks meet at what each round says, not at ``--master-port``, where torch's WorkerSpec would have them."""
    if isinstance(spec.rdzv_handler, StaticRounds):
        spec.master_addr = spec.master_port = None


class Roll:
    """Which nodes wait for the round, from what each of them writes: something else each time. Pure.

    What lies there when it is first read may be of a launcher that is gone: only a change tells of one that lives.
    """

    def __init__(self, nodes: Sequence[int], *, alive_s: float) -> None:
        """A node that has changed nothing for ``alive_s`` seconds doesn't wait any more."""
        self._alive_s = alive_s
        self._values: dict[int, str] = {}
        self._changed_s: dict[int, float | None] = dict.fromkeys(nodes)

    def note(self, values: Sequence[str], now_s: float) -> None:
        """``values`` were read now, one for each of the nodes; empty: it has never written one."""
        for node, value in zip(self._changed_s, values, strict=True):
            if value and self._values.setdefault(node, value) != value:
                self._values[node], self._changed_s[node] = value, now_s

    def missing(self, now_s: float) -> list[int]:
        """Nodes that don't wait."""
        return [node for node, at_s in self._changed_s.items() if at_s is None or now_s - at_s > self._alive_s]


class StaticRounds(RendezvousHandler):
    """``--rdzv-backend static`` with several nodes: rounds in which all meet, and a fresh store for each cycle.

    torch's own has one store for the whole job and no rounds: the ranks of a cycle find the addresses of the last one
    there, and a node begins the next cycle whether the others are there or not. Here node 0 calls the roll in the store
    at ``--master-addr``, which serves for the whole job.
    """

    def __init__(self, static: StaticTCPRendezvous) -> None:
        self._address, self._port = static.master_addr, static.master_port
        self._rank, self._nodes = static.rank, static.world_size
        self._run_id, self._timeout = static.run_id, static.timeout
        self._interval_s = _INTERVAL_S + _S_PER_NODE * self._nodes
        self._store: Any = None
        self._ranks_store: Any = None
        self._missing = list(range(1, self._nodes))
        self.number = -1
        """Of the last round, from 0."""

    def waits_for(self) -> str:
        """For whom the round waits, as far as this node knows."""
        if self._rank:
            return f"waiting for node 0 ({self._address}:{self._port}), which waits for all {self._nodes} nodes"
        shown = ", ".join(map(str, self._missing[:_SHOWN])) + (", ..." if len(self._missing) > _SHOWN else "")
        return f"waiting for {len(self._missing)} of {self._nodes} nodes: --node-rank {shown}"

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in a store of node 0's launcher."""
        return True

    def get_backend(self) -> str:
        """As torch names it."""
        return "static"

    def get_run_id(self) -> str:
        """torchrun's --rdzv-id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes.

        Raises:
            RendezvousTimeoutError: they don't come.
            RendezvousConnectionError: node 0 can't be reached.
        """
        self._ranks_store = None
        try:
            if self._store is None:
                self._store = self._open(self._port, is_first=self._rank == 0)
            number, port = self._call_roll() if self._rank == 0 else self._answer()
        except RuntimeError as error:  # torch's for stores, whatever it is
            raise RendezvousConnectionError("The connection to the rendezvous has failed.") from error
        self.number = number - 1
        store = PrefixStore(f"{_PREFIX}/{self._run_id}/{number}", self._store)
        return RendezvousInfo(store, self._rank, self._nodes, RendezvousStoreInfo(self._address, port))

    def _open(self, port: int, *, is_first: bool) -> Any:
        return TCPStore(
            self._address,
            port,
            self._nodes,
            is_first,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=port != 0,
        )

    def _call_roll(self) -> tuple[int, int]:
        """On node 0: the number of the round, and the port of the store for its ranks, when all nodes are there."""
        others = range(1, self._nodes)
        waiting = [self._key("waiting", node) for node in others]
        for key in waiting:
            self._store.compare_set(key, "", "")  # so that all can be read at once
        roll = Roll(others, alive_s=_ALIVE_INTERVALS * self._interval_s)
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while True:
            values = [value.decode() for value in self._store.multi_get(waiting)]
            roll.note(values, time.monotonic())
            self._missing = roll.missing(time.monotonic())
            if not self._missing:
                break
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(f"after {self._timeout.total_seconds():g} s still {self.waits_for()}")
            time.sleep(self._interval_s)
        self._ranks_store = self._open(0, is_first=True)
        number, port = int(self._store.add(self._key("round"), 1)), int(self._ranks_store.port)
        tokens = [value.partition(":")[0] for value in values]
        keys = [self._key("go", node, token) for node, token in zip(others, tokens, strict=True)]
        self._store.multi_set(keys, [json.dumps([number, port])] * len(keys))
        return number, port

    def _answer(self) -> tuple[int, int]:
        """On all other nodes: the same, when node 0 has told it."""
        token = uuid.uuid4().hex
        go = self._key("go", self._rank, token)
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        for count in itertools.count():
            self._store.set(self._key("waiting", self._rank), f"{token}:{count}")
            if self._store.check([go]):
                break
            if time.monotonic() > deadline_s:
                raise RendezvousTimeoutError(f"after {self._timeout.total_seconds():g} s still {self.waits_for()}")
            time.sleep(self._interval_s)
        number, port = json.loads(self._store.get(go))
        return number, port

    def _key(self, *parts: object) -> str:
        return "/".join([_PREFIX, self._run_id, *map(str, parts)])

    def is_closed(self) -> bool:
        """Always False: the nodes of a static rendezvous may come at any time."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Always 0: no node can join those that there are."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to do: the store goes with node 0's launcher."""
        return True


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
