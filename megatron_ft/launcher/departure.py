"""One node leaves a job that goes on without it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_ft.launcher import node_lines, torch_rendezvous
from megatron_ft.launcher.node import Node

__all__ = ["leave"]

_LOOK_S = 1.0
_NOBODY_FOR_S = 20.0
"""Nodes that restart are in no round for a moment."""


def leave(node: Node, handler: Any) -> None:
    """Take this node out of the rendezvous without closing it for the others.

    If this launcher hosts the rendezvous, it returns when no node needs that any more: the others can't go on
    without.

    Raises:
        SignalException: the launcher was asked to stop meanwhile.
    """
    handler.shutdown = lambda: True  # which would close it
    with contextlib.suppress(RendezvousError):
        node.blocking(lambda: torch_rendezvous.leave_rendezvous(handler))
    port = torch_rendezvous.store_port(handler)
    if port is None or not _listens_at(port):
        return
    node.say(node_lines.kept_as_host())
    needed_s = time.monotonic()
    with contextlib.suppress(RendezvousError):
        while time.monotonic() - needed_s < _NOBODY_FOR_S:
            nodes = node.blocking(lambda: torch_rendezvous.nodes_in_rendezvous(handler))
            if nodes is None:
                break  # closed: the job is over
            if nodes:
                needed_s = time.monotonic()
            node.reactor.run_until(lambda: bool(node.signals.received), deadline_s=time.monotonic() + _LOOK_S)
            node.raise_if_asked_to_stop()


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
