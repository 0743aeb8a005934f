"""Ranks that connect: who they are, and whether they may have this monitor."""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages.rank import FROM_RANK, RankHello
from megatron_ft.ipc.linux.processes import is_gone
from megatron_ft.ipc.monitor_process import AttachedRank
from megatron_ft.ipc.wire import Channel, Message, check_peer

_MOST = 16
PATIENCE_S = 5.0
"""How long a connection may stay silent before it is closed."""


class Caller(NamedTuple):
    """A connection that hasn't said hello yet. Its identity is what the kernel says, never what it says."""

    channel: Channel
    pid: int
    pidfd: int
    give_up_at: float


class Callers(dict[int, Caller]):
    """Those that have connected and not been answered yet, by descriptor."""

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection, unless another user made it; of too many the oldest is closed."""
        if len(self) >= _MOST:
            self.dismiss(next(iter(self.values())))
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # it went away between the wake-up and now
        try:
            pid = check_peer(sock)
            pidfd = os.pidfd_open(pid)
        except (ProtocolError, OSError):
            sock.close()
            return
        self[sock.fileno()] = Caller(Channel(sock, takes_fds=False), pid, pidfd, time.monotonic() + PATIENCE_S)

    def dismiss(self, caller: Caller) -> None:
        """Close a connection."""
        # by identity: a channel that an error has closed has no number any more
        for fd in [fd for fd, known in self.items() if known is caller]:
            del self[fd]
        caller.channel.close()
        os.close(caller.pidfd)

    def forget_silent(self) -> None:
        """Close the connections that have said nothing for too long."""
        now = time.monotonic()
        for caller in [caller for caller in self.values() if now >= caller.give_up_at]:
            self.dismiss(caller)


def parse(message: Message) -> RankHello:
    """Check a hello.

    Raises:
        ProtocolError: it isn't one.
    """
    hello = FROM_RANK.parse(message)
    if hello.user_code_ns > time.monotonic_ns():
        raise ProtocolError(f"hello has user_code_ns = {hello.user_code_ns}, which is still to come")
    return hello


def refusal(hello: RankHello, attached: AttachedRank, *, closing: bool, is_stranger: bool) -> str | None:
    """Why a hello is refused while another rank is attached, which may be ``closing``; None if it isn't.

    A higher cycle wins: its predecessor is on its way out. In the same cycle the first one wins as long as it
    lives and hasn't said goodbye, and so it does against a stranger: one that isn't of the processes that the
    launcher has started last, while the attached one is.
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
