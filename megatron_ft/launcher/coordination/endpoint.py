"""The listening socket of a node's coordinator: at the rendezvous endpoint where that is this machine."""

from __future__ import annotations

import enum
import errno
import ipaddress
import select
import socket
import time

from megatron_ft.core.errors import ConfigError, ProtocolError
from megatron_ft.core.messages.secret import HANDSHAKE, Ask, Challenge, Open
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import HANDSHAKE_BYTES
from megatron_ft.ipc.wire import VersionError, encode

_ANSWER_S = 15.0
"""A coordinator may just be starting, on a machine that has much to do; one whose job has ended stays for 5 s."""
_CERTAIN_S = 1.0
"""Seconds of refused or ended connections after which no coordinator can just be being replaced."""
_PAUSE_S = 0.02


class _Holder(enum.Enum):
    """Which process has a port."""

    COORDINATOR = "coordinator"
    OVER = "a coordinator whose job has ended"
    NOBODY = "no process any more"
    OTHER = "another program"


def listen_anywhere(endpoint_host: str) -> socket.socket:
    """At a free port: on loopback if the job meets there, else on all addresses.

    Raises:
        OSError: there is none.
    """
    return tcp.listen(_bind_host(endpoint_host), 0)


def take_endpoint(host: str, port: int) -> socket.socket | None:
    """Listen at the endpoint, which is this machine; 0 is any free port. None if another launcher has a coordinator
    there: of several on one machine one is the first, and one that is started again may find the old coordinator.

    Raises:
        ConfigError: another program has the port, or it can't be opened.
    """
    begun_s = time.monotonic()
    doubted_s: float | None = None
    while True:
        try:
            return tcp.listen(_bind_host(host), port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"the rendezvous endpoint {host}:{port} can't be used: {error.strerror}") from None
        now_s = time.monotonic()
        holder = _holder(host, port, begun_s + _ANSWER_S - now_s)
        if holder is _Holder.COORDINATOR:
            return None
        if holder is _Holder.OVER:
            doubted_s = None
        elif doubted_s is None:
            doubted_s = now_s
        certain = doubted_s is not None and now_s - doubted_s >= _CERTAIN_S
        if certain or time.monotonic() - begun_s >= _ANSWER_S:
            raise ConfigError(
                f"another program has the port of the rendezvous endpoint {host}:{port} on this machine: "
                "end it, or choose another port"
            )
        time.sleep(_PAUSE_S)


def _holder(host: str, port: int, within_s: float) -> _Holder:
    """Return what listens at a port of this machine."""
    until_s = time.monotonic() + within_s
    bound = _bind_host(host)
    try:
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError:
        return _Holder.OTHER
    with sock:
        sock.settimeout(max(0.01, within_s))
        try:
            sock.connect((bound or "127.0.0.1", port))
            peer = tcp.Peer(sock, allowance=HANDSHAKE_BYTES)
            peer.write(encode(Ask()))
            while peer.is_open and (left_s := until_s - time.monotonic()) > 0:
                peer.flush()
                select.select([sock], [], [], left_s)
                for message in map(HANDSHAKE.parse, peer.read()):
                    if isinstance(message, Open | Challenge):
                        return _Holder.OVER if message.over else _Holder.COORDINATOR
                    return _Holder.OTHER
        except VersionError:
            return _Holder.COORDINATOR  # of another version: a launcher that connects to it is refused
        except ConnectionRefusedError:
            return _Holder.NOBODY
        except (OSError, ProtocolError):
            return _Holder.OTHER
    return _Holder.OTHER


def is_loopback(host: str) -> bool:
    """Whether this name or address is any machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_host(host: str) -> str:
    """Return the host to listen on for launchers that connect to ``host``: loopback if none comes from elsewhere."""
    if not is_loopback(host):
        return ""
    return "127.0.0.1" if host == "localhost" else host
