"""``--rdzv-backend static`` with several nodes: rounds in which all nodes meet, and a fresh store for each cycle.

torch's own has one store for the whole job and no rounds: the ranks of a cycle find the addresses of the last one
there, and a node begins the next cycle whether the others are there or not.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

__all__ = ["Roll", "StaticRounds", "in_rounds", "let_rounds_name_the_store"]

_PREFIX = "megatron_ft/static"
_INTERVAL_S = 0.05
_S_PER_NODE = 0.001
"""One store serves all nodes: with many of them each asks less often."""
_ALIVE_INTERVALS = 20
_SHOWN = 20


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


def in_rounds(handler: Any) -> Any:
    """A static rendezvous of several nodes, in rounds; any other as it is."""
    if isinstance(handler, StaticTCPRendezvous) and handler.world_size > 1:
        return StaticRounds(handler)
    return handler


def let_rounds_name_the_store(spec: Any) -> None:
    """The ranks meet at what each round says, not at ``--master-port``, where torch's WorkerSpec would have them."""
    if isinstance(spec.rdzv_handler, StaticRounds):
        spec.master_addr = spec.master_port = None


class StaticRounds(RendezvousHandler):
    """Node 0 calls the roll in the store at ``--master-addr``, which serves for the whole job."""

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
