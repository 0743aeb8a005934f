"""TCP between hosts: sockets that are quick to detect a dead peer, and addresses as text."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from megatron_ft.errors import ProtocolError

_CONNECT_S = 3.0
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)
"""Seconds, except for the last in milliseconds: a host that is off or cut off ends the connection after 5 s. A listener
has them for the connections that it accepts."""


def listen(host: str, port: int, *, backlog: int = 65535) -> socket.socket:
    """Return a listening socket; with an empty ``host`` on all addresses: IPv4, and IPv6 if available.

    Raises:
        OSError: the address can't be used.
    """
    is_everywhere = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_everywhere or ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in _OPTIONS:
            sock.setsockopt(*option)
        if is_everywhere:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def look_up(host: str, port: int) -> list[tuple[int, int, int, str, Any]]:
    """Return all addresses of a host, as ``socket.getaddrinfo``. Waits for name servers, unless it is an address.

    Raises:
        OSError: there are none.
    """
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host: {error}") from None


def connect(host: str, port: int) -> socket.socket:
    """Return a connection to a host. Waits for a name server, and 3 s for each address that is silent.

    Raises:
        OSError: no process listens there; a ``socket.gaierror`` if the host isn't known.
    """
    problem = OSError("the host name has no address")
    for family, kind, protocol, _, address in look_up(host, port):
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
            sock.settimeout(_CONNECT_S)
            sock.connect(address)
            if sock.getpeername() == sock.getsockname():  # the port that it has by chance is the one it looks for
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[host]:port`` or ``host``, whose port is 0.

    Raises:
        ProtocolError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, "0"
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise ProtocolError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """Format an address for ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
