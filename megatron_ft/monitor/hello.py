"""Connections of ranks: identification, and whether a rank may use this monitor."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.linux.processes import is_gone
from megatron_ft.link.messages.rank_messages import FROM_RANK, FromRank, RankHello
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import Channel, accept_peer
from megatron_ft.monitor.process import AttachedRank

_MOST = 16
PATIENCE_S = 5.0
"""Seconds a connection may stay silent before it is closed."""


class Caller(NamedTuple):
    """A connection that hasn't sent its hello yet. ``pid`` comes from the kernel, never from the peer."""

    channel: Channel
    pid: int
    pidfd: int
    give_up_at: float


class Callers(dict[int, Caller]):
    """Connections waiting for an answer, by descriptor. ``read`` is called once one can be read."""

    def __init__(self, reactor: Reactor, read: Callable[[Caller], object]) -> None:
        super().__init__()
        self._reactor = reactor
        self._read = read

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection of the same user. At the limit, the oldest waiting connection is closed."""
        if len(self) >= _MOST:
            self.dismiss(next(iter(self.values())))
        accepted = accept_peer(listener)
        if accepted is not None:
            caller = self[accepted[0].fileno()] = Caller(*accepted, time.monotonic() + PATIENCE_S)
            self._reactor.watch(caller.channel.fileno(), partial(self._read, caller))

    def dismiss(self, caller: Caller) -> None:
        # compare identities: a channel closed by an error has no descriptor number
        for fd in [fd for fd, known in self.items() if known is caller]:
            del self[fd]
            self._reactor.unwatch(fd)
        caller.channel.close()
        os.close(caller.pidfd)

    def forget_silent(self) -> None:
        """Close connections that have been silent for `PATIENCE_S`."""
        now = time.monotonic()
        for caller in [caller for caller in self.values() if now >= caller.give_up_at]:
            self.dismiss(caller)


def parse(message: Raw) -> FromRank:
    """Parse and check a first message.

    Raises:
        ProtocolError: it is malformed, or its ``user_code_ns`` lies in the future.
    """
    hello = FROM_RANK.parse(message)
    if isinstance(hello, RankHello) and hello.user_code_ns > time.monotonic_ns():
        raise ProtocolError(f"hello has user_code_ns = {hello.user_code_ns}, which is still to come")
    return hello


def refusal(hello: RankHello, attached: AttachedRank, *, closing: bool, is_stranger: bool) -> str | None:
    """Return why a hello is refused while ``attached`` is monitored, None if it is accepted.

    A higher cycle wins: the rank of the earlier one is about to end. Within a cycle the first rank wins as long as it
    lives and isn't ``closing``. A rank of the launcher also wins against a stranger of a higher cycle: a process that
    isn't in the process group the launcher started last.
    """
    pid, cycle = attached.pid, attached.cycle
    if hello.cycle < cycle:
        return f"cycle {hello.cycle} is over, this monitor watches cycle {cycle}"
    if closing or is_gone(attached.pidfd):
        return None
    if is_stranger and hello.cycle > cycle:
        return f"cycle {hello.cycle} has not begun, the launcher's rank of cycle {cycle} (process {pid}) still runs"
    if hello.cycle > cycle:
        return None
    return f"process {pid} of cycle {cycle} is connected already"
