"""Ranks that connect: who they are, and whether they may have this monitor."""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.printable import shown
from megatron_ft.ipc.linux.processes import is_gone
from megatron_ft.ipc.wire import Channel, check_peer

PATIENCE_S = 5.0
"""How long a connection may stay silent before it is closed."""
_MAX_RANK = 10**7
_MAX_CYCLE = 2**62


class Caller(NamedTuple):
    """A connection that hasn't said hello yet. Its identity is what the kernel says, never what it says."""

    channel: Channel
    pid: int
    pidfd: int
    give_up_at: float


class Hello(NamedTuple):
    """What a rank says of itself."""

    cycle: int
    rank: int
    warmup_iterations: int
    user_code_ns: int
    """When its script began (monotonic); 0 if that isn't known."""
    has_group: bool
    """It has set its process group up."""
    is_again: bool
    """It has said so before, and got no answer."""


def accept(listener: socket.socket) -> Caller | None:
    """Accept one connection; None if it went away or belongs to another user."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None  # it went away between the wake-up and now
    try:
        pid = check_peer(sock)
        pidfd = os.pidfd_open(pid)
    except (ProtocolError, OSError):
        sock.close()
        return None
    return Caller(Channel(sock, takes_fds=False), pid, pidfd, time.monotonic() + PATIENCE_S)


def parse(message: dict[str, object]) -> Hello:
    """Check a hello.

    Raises:
        ProtocolError: it isn't one.
    """
    if message["type"] != "hello":
        raise ProtocolError(f"expected a hello, got {shown(message['type'])}")
    return Hello(
        cycle=_number(message, "cycle", _MAX_CYCLE),
        rank=_number(message, "rank", _MAX_RANK),
        warmup_iterations=_number(message, "warmup_iterations", _MAX_CYCLE),
        user_code_ns=_number({"user_code_ns": 0, **message}, "user_code_ns", time.monotonic_ns()),
        has_group=message.get("has_group") is True,
        is_again=message.get("again") is True,
    )


def refusal(hello: Hello, *, pid: int, pidfd: int, cycle: int, closing: bool, is_stranger: bool = False) -> str | None:
    """Why a hello is refused while another rank is attached; None if it isn't.

    A higher cycle wins: its predecessor is on its way out. In the same cycle the first one wins as long as it
    lives and hasn't said goodbye, and so it does against a stranger: one that isn't of the processes that the
    launcher has started last, while the attached one is.
    """
    if hello.cycle < cycle:
        return f"cycle {hello.cycle} is over, this monitor watches cycle {cycle}"
    if closing or is_gone(pidfd):
        return None
    if is_stranger and hello.cycle > cycle:
        return f"cycle {hello.cycle} has not begun, the launcher's rank of cycle {cycle} (process {pid}) still runs"
    if hello.cycle > cycle:
        return None
    return f"process {pid} of cycle {cycle} is connected already"


def _number(message: dict[str, object], name: str, limit: int) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ProtocolError(f"hello has {name}={shown(value)}")
    return value
