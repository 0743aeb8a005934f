"""The static rendezvous in rounds: who is there, and who only was."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_ft.launcher.coordination.torch_rounds import Roll, in_rounds


def test_only_a_change_tells_of_a_node_that_waits() -> None:
    roll = Roll([1, 2], alive_s=1.0)
    assert roll.missing(0.0) == [1, 2]
    roll.note(["a:7", ""], 0.0)  # of a launcher that has gone on, or died, since
    roll.note(["a:7", ""], 0.5)
    assert roll.missing(0.5) == [1, 2]
    roll.note(["b:0", "c:0"], 0.6)
    assert roll.missing(0.6) == [2]
    roll.note(["b:1", "c:1"], 0.7)
    assert roll.missing(0.7) == []
    roll.note(["b:1", "c:2"], 1.5)
    assert roll.missing(1.75) == [1], "it has waited, and died while others were waited for"


def meeting_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def handler(port: int, rank: int, *, nodes: int = 2, timeout_s: int = 30) -> Any:
    return in_rounds(StaticTCPRendezvous("127.0.0.1", port, rank, nodes, "run", timeout_s))


def meet(*handlers: Any) -> list[Any]:
    """What each is told in one round; None for one that isn't."""
    met: list[Any] = [None] * len(handlers)

    def one(index: int) -> None:
        met[index] = handlers[index].next_rendezvous()

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return met


def test_each_round_has_a_fresh_store_for_the_nodes_and_one_for_the_ranks() -> None:
    port = meeting_port()
    nodes = [handler(port, rank) for rank in range(2)]
    first = meet(*nodes)
    first[1].store.set("address", "of cycle 0")
    assert first[0].store.get("address") == b"of cycle 0"
    second = meet(*nodes)
    assert not second[0].store.check(["address"])
    ports = {met.bootstrap_store_info.master_port for met in (*first, *second)}
    assert len(ports) == 2
    assert port not in ports
    assert [met.rank for met in second] == [0, 1]
    # a launcher that was started again in place of the second one, which has left its name in the store
    third = meet(nodes[0], handler(port, 1))
    assert not third[1].store.check(["address"])
    third[0].store.underlying_store.set("of the run", "kept")
    assert first[0].store.underlying_store.get("of the run") == b"kept"


def test_a_node_that_was_there_is_waited_for() -> None:
    port = meeting_port()
    nodes = [handler(port, rank) for rank in range(2)]
    meet(*nodes)
    nodes[0]._timeout = timedelta(seconds=0.5)
    with pytest.raises(RendezvousTimeoutError, match=r"after 0\.5 s still waiting for 1 of 2 nodes: --node-rank 1$"):
        nodes[0].next_rendezvous()
    assert nodes[1].waits_for() == f"waiting for node 0 (127.0.0.1:{port}), which waits for all 2 nodes"


def test_a_lost_host_is_a_rendezvous_that_failed() -> None:
    port = meeting_port()
    nodes = [handler(port, rank) for rank in range(2)]
    met = meet(*nodes)
    nodes[0]._store = nodes[0]._ranks_store = met[0] = None
    with pytest.raises(RendezvousConnectionError, match="connection to the rendezvous"):
        nodes[1].next_rendezvous()


def test_a_single_node_is_left_to_torch() -> None:
    alone = StaticTCPRendezvous("127.0.0.1", 1, 0, 1, "run", 30)
    assert in_rounds(alone) is alone
