"""Connections of ranks. A rank is known by its connection and watched by its process, whichever ends first."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_ft.ipc.linux.processes import is_gone
from megatron_ft.ipc.wire import Channel, ChannelClosedError, accept_peer
from megatron_ft.memory.base.keeper_messages import Fetch, KeeperToRank
from megatron_ft.memory.rules.retention import BeginSegment

_MOST = 4096
_SEND_S = 0.5


@dataclass(eq=False)
class RankCaller:
    """One connection. ``rank``: -1 until its hello."""

    channel: Channel
    pidfd: int
    rank: int = -1
    waits_for: BeginSegment | Fetch | None = None
    """Request that isn't answered yet."""
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = self.channel.fileno()

    @property
    def is_open(self) -> bool:
        return self.channel.fileno() >= 0

    def answer(self, message: KeeperToRank, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a caller that has gone is noticed when it is read."""
        with contextlib.suppress(ChannelClosedError):
            self.channel.send(message, fds, timeout_s=_SEND_S)


class RankCallers(dict[int, RankCaller]):
    """All connections, by descriptor."""

    def accept(self, listener: socket.socket) -> RankCaller | None:
        """Accept a connection of the same user; None if there is none."""
        accepted = accept_peer(listener)
        if accepted is None:
            return None
        channel, _, pidfd = accepted
        if len(self) >= _MOST:
            os.close(pidfd)
            channel.close()
            return None
        caller = RankCaller(channel, pidfd)
        self[caller.fd] = caller
        return caller

    def of(self, rank: int) -> Iterator[RankCaller]:
        return (each for each in list(self.values()) if each.rank == rank)

    def closed(self) -> list[RankCaller]:
        """Return the connections that a failed send has closed."""
        return [each for each in self.values() if not each.is_open]

    def living(self, rank: int, besides: RankCaller) -> RankCaller | None:
        """Return another connection by which a living process is this rank."""
        found = (each for each in self.of(rank) if each is not besides and each.is_open)
        return next((each for each in found if not is_gone(each.pidfd)), None)

    def forget(self, caller: RankCaller) -> None:
        """Close a connection."""
        del self[caller.fd]
        caller.channel.close()
        os.close(caller.pidfd)
