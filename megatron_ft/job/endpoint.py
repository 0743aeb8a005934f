"""The rendezvous endpoint and this machine: which addresses are its own, and where it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from megatron_ft.link import tcp

HERE = "127.0.0.1"
_ANY_PORT = 9


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on this machine for launchers that connect to ``host``: on loopback if none comes from elsewhere.

    Raises:
        OSError: another process does, say.
    """
    if not is_loopback(host):
        return tcp.listen("", port)
    return tcp.listen(HERE if host == "localhost" else host, port)


def is_loopback(host: str) -> bool:
    """Return True if this name or address is any machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def routes(host: str) -> dict[str, str]:
    """Return the addresses of a host, each with the one from which this machine reaches it; empty if there is no way.

    An address of this machine is reached from itself. There are no addresses if a name can't be looked up. Waits for a
    name server; nothing is sent to the host.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for family, *_, address in tcp.look_up(host, _ANY_PORT):
            found[address[0]] = address[0] if is_loopback(address[0]) else ""
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                found[address[0]] = found[address[0]] or sock.getsockname()[0]
    return found
