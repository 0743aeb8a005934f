"""The rendezvous endpoint and this machine: which names and addresses are its own."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.link import tcp
from megatron_ft.link.base.wording import listed

_ALIVE_S = 1.0
"""Seconds that another host has to answer."""
_HERE = "127.0.0.1"


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on this machine for launchers that connect to ``host``: on loopback if none comes from elsewhere.

    Raises:
        OSError: another process does, say.
    """
    if not is_loopback(host):
        return tcp.listen("", port)
    return tcp.listen(_HERE if host == "localhost" else host, port)


def check_name(host: str, port: int) -> None:
    """Check a name of the endpoint that stands for this machine: others that it stands for would begin a job each.

    Raises:
        ConfigError: another host answers at an address of that name; or it stands for loopback addresses only, and
            isn't "localhost", an address, or a name that this host has for itself.
    """
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return
    try:
        found = {str(address[0]): family for family, *_, address in tcp.look_up(host, port)}
    except OSError:
        return
    others = [each for each, family in found.items() if not is_own_address(family, (each, port))]
    problem = ""
    if all(map(is_loopback, found)):
        shown = listed(sorted(found))
        problem = f"{shown} on this machine, which no other node reaches: name the host as the other nodes do"
    elif len(others) < len(found) and (alive := sorted(each for each in others if answers(each, port))):
        problem = f"the name of this host and of others ({listed(alive)}): name one host"
    if problem:
        raise ConfigError(
            f"--rdzv-endpoint: {host} is {problem}, or set --rdzv-conf is_host=true for one launcher and "
            "is_host=false for the others"
        )


def answers(host: str, port: int) -> bool:
    """Return True if a host answers at this address, with a listening process or without."""
    try:
        socket.create_connection((host, port), timeout=_ALIVE_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


def is_this_machine(host: str, *, unknown: bool) -> bool:
    """Return True if a name or address is this machine's, as far as its name server and network interfaces know.

    ``unknown`` is the answer for a name that can't be looked up: others may know this machine by it.
    """
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        found = tcp.look_up(host, 0)
    except OSError:
        return unknown
    return any(is_own_address(family, address) for family, *_, address in found)


def is_own_address(family: int, address: tuple[Any, ...]) -> bool:
    """Return True if the kernel reaches this address from the same address, as it does its own."""
    return is_loopback(address[0]) or _own_end(family, (address[0], 9, *address[2:])) == address[0]


def own_host(local_addr: str | None, endpoint: str) -> str:
    """Return the name or address by which ranks of other nodes reach this machine. May wait for a name server.

    Args:
        local_addr: of ``--local-addr``: the user knows best.
        endpoint: where the job meets; empty if it has one node.

    It is the address from which this machine reaches the endpoint, which others needn't look up. Where that tells
    nothing, it is the name that this host has for itself, as torchrun has it.
    """
    if local_addr:
        return local_addr
    host, port = tcp.parse_address(endpoint)
    if not endpoint or is_loopback(host):
        return _HERE
    try:
        family, *_, target = tcp.look_up(host, port)[0]
    except OSError:
        return socket.getfqdn()
    address = _own_end(family, target)
    # %: an address that only means something together with an interface of this machine
    return socket.getfqdn() if address is None or is_loopback(address) or "%" in address else address


def is_loopback(host: str) -> bool:
    """Return True if this name or address is any machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_end(family: int, address: tuple[Any, ...]) -> str | None:
    """Return the address from which this machine reaches that one; None if there is no way. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return None
