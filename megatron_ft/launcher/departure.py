"""One node leaves a job that goes on without it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_ft.core.restart_policy import NodeState
from megatron_ft.launcher import node_lines, torch_rendezvous
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import Peers
from megatron_ft.launcher.rounds import heard_of_end, nodes_aside

__all__ = ["briefly", "close_for_standby", "hosts", "leave", "leave_stuck", "step_out"]

_LOOK_S = 1.0
_HEAR_S = 5.0
"""They ask every second or oftener, and one that was killed while it stood by or aside never hears it."""
_HEARD_AGAIN_S = 0.05
_BRIEFLY_S = 1.0
_NOBODY_FOR_S = 20.0
"""Nodes that restart are in no round for a moment."""
_COUNT_FOR_S = 3.0
"""The same, where they are counted only: they don't need this launcher any more, or they do."""
_COUNT_AGAIN_S = 0.2


def leave(node: Node, handler: Any) -> None:
    """Take this node out of the rendezvous without closing it for the others.

    If this launcher hosts the rendezvous, it returns when no node needs that any more: the others can't go on
    without.

    Raises:
        SignalException: the launcher was asked to stop meanwhile.
    """
    handler.shutdown = lambda: True  # which would close it
    step_out(node, handler)
    _stay_as_host(node, handler)


def leave_stuck(node: Node, handler: Any, peers: Peers, *, why: str) -> bool:
    """Leave because of processes that can't be ended, when the others may be meeting already. Whether the job ends.

    It does where too few are left: they are told, else they would wait for another node.

    Raises:
        SignalException: the launcher was asked to stop meanwhile.
    """
    peers.tell(NodeState.EXCLUDED, lambda: why)
    min_nodes, left = node.policy.min_nodes, 0
    with contextlib.suppress(RendezvousError):
        node.blocking(lambda: torch_rendezvous.leave_rendezvous(handler))
        deadline_s = time.monotonic() + _COUNT_FOR_S
        while left < min_nodes and time.monotonic() < deadline_s:
            left = node.blocking(lambda: torch_rendezvous.nodes_in_rendezvous(handler)) or 0
            if left < min_nodes:
                again_s = time.monotonic() + _COUNT_AGAIN_S
                node.reactor.run_until(lambda: bool(node.signals.received), deadline_s=again_s)
                node.raise_if_asked_to_stop()
    if left < min_nodes:
        node.say(node_lines.too_few_left(left=left, min_nodes=min_nodes))
        peers.ask_for_shutdown(f"{why}; {node_lines.too_few_left(left=left, min_nodes=min_nodes)}")
        return True
    handler.shutdown = lambda: True
    _stay_as_host(node, handler)
    return False


def _stay_as_host(node: Node, handler: Any) -> None:
    """A store that lives in this launcher stays until nobody needs it."""
    if not hosts(handler):
        return
    node.say(node_lines.kept_as_host())
    needed_s = time.monotonic()
    # those that were killed there are counted, too: as long as a round waits for a missing node
    aside_until_s = needed_s + torch_rendezvous.join_timeout_s(handler)
    with contextlib.suppress(RendezvousError):
        while time.monotonic() - needed_s < _NOBODY_FOR_S:
            nodes = node.blocking(lambda: torch_rendezvous.nodes_in_rendezvous(handler))
            if nodes is None:
                break  # closed: the job is over
            if nodes or (nodes_aside(handler) and time.monotonic() < aside_until_s):
                needed_s = time.monotonic()
            node.reactor.run_until(lambda: bool(node.signals.received), deadline_s=time.monotonic() + _LOOK_S)
            node.raise_if_asked_to_stop()


def step_out(node: Node, handler: Any) -> None:
    """Take part in no round until this node joins one again.

    Raises:
        SignalException: the launcher was asked to stop meanwhile.
    """
    with contextlib.suppress(RendezvousError):
        node.blocking(lambda: torch_rendezvous.leave_rendezvous(handler))


def close_for_standby(node: Node, handler: Any) -> None:
    """The job ends, and nodes stand by or aside that ask from time to time whether it lives: let them hear it.

    Else all they would see is that the host of the rendezvous is gone, which may be a disaster.
    """
    if node.line.max_nodes == 1 or not hosts(handler):
        return
    bystanders = nodes_aside(handler) + _nodes_standing_by(handler)
    if not bystanders:
        return
    torch_rendezvous.close(handler)
    handler.shutdown = lambda: True
    until_s = time.monotonic() + _HEAR_S
    while heard_of_end(handler) < bystanders and time.monotonic() < until_s and not node.signals.received:
        node.reactor.run_once(_HEARD_AGAIN_S)


def _nodes_standing_by(handler: Any) -> int:
    try:
        waiting = torch_rendezvous.nodes_waiting(handler, ())
    except RendezvousError:
        return 0
    return len(waiting.joining | waiting.spare) + waiting.unknown


def briefly(node: Node, ask: Callable[[], None]) -> None:
    """Tell the store something on the way out, if its host answers in time."""
    until_s = time.monotonic() + _BRIEFLY_S

    def check() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError

    with contextlib.suppress(TimeoutError):
        node.reactor.call_blocking(ask, check)


def hosts(handler: Any) -> bool:
    """Whether the store of the rendezvous is in this process: without it the others can't go on."""
    port = torch_rendezvous.store_port(handler)
    return port is not None and _listens_at(port)


def _listens_at(port: int) -> bool:
    """Whether this process has a listening TCP socket with that port."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                local, state, inode = fields[1], fields[3], fields[9]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port and f"socket:[{inode}]" in own:
                    return True
    return False
