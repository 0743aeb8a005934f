"""A rank's connection. The rank is known by it and watched by its process, whichever ends first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from megatron_ft.ipc.wire import Channel, ChannelClosedError
from megatron_ft.memory.base.keeper_messages import Fetch, KeeperToRank
from megatron_ft.memory.rules.retention import BeginSegment

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
