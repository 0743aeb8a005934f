"""The listening socket of a node's coordinator: at the rendezvous endpoint where that is this machine."""

from __future__ import annotations

import enum
import errno
import ipaddress
import select
import socket
import time
from typing import Any, NamedTuple

from megatron_ft.core.errors import ConfigError, ProtocolError
from megatron_ft.core.messages.secret_messages import HANDSHAKE, Ask, Challenge, Open
from megatron_ft.core.wording import listed, printable
from megatron_ft.ipc.linux.listeners import holders
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import HANDSHAKE_BYTES
from megatron_ft.ipc.wire import VersionError, encode

ANSWER_S = 15.0
"""A coordinator may just be starting, on a machine that has much to do; one whose job has ended stays for 5 s."""
CERTAIN_S = 5.0
"""Seconds of refused or ended connections after which neither a coordinator can just be being replaced, nor a process
be about to end."""
_PAUSE_S = 0.02
_ALIVE_S = 1.0
"""Seconds that another host has to answer."""
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that no host has, to find the one from which this machine reaches others."""


class _Kind(enum.Enum):
    """Kind of process that answers at a port."""

    COORDINATOR = "a coordinator"
    OVER = "a coordinator whose job has ended"
    NOBODY = "no process"
    OTHER = "another program"


class _Answer(NamedTuple):
    kind: _Kind
    job: str = ""


def take_again(host: str, port: int) -> socket.socket | None:
    """Listen at the endpoint, which is this machine, if no other process does now."""
    try:
        return tcp.listen(_bind_host(host), port)
    except OSError:
        return None


def check_names_one_host(host: str, port: int) -> None:
    """Refuse an endpoint whose name stands for this machine and for others: each of them would begin a job of its own.

    Raises:
        ConfigError: another host answers at an address of that name.
    """
    try:
        found = [] if is_loopback(host) else tcp.look_up(host, port)
    except OSError:
        return
    others = {str(address[0]) for family, *_, address in found if not is_own_address(family, address)}
    if len(others) == len({address[0] for *_, address in found}):
        return
    alive = sorted(each for each in others if host_answers(each, port))
    if alive:
        raise ConfigError(
            f"--rdzv-endpoint: {host} is the name of this host and of others ({listed(alive)}): name one host, or set "
            "--rdzv-conf is_host=true for one launcher and is_host=false for the others"
        )


def refuse_loopback_name(host: str) -> None:
    """Refuse a name that stands for loopback addresses only: no other node would meet this one there.

    Raises:
        ConfigError: it does, and isn't "localhost", an address, or a name that this host has for itself.
    """
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return
    try:
        found = {str(address[0]) for *_, address in tcp.look_up(host, 0)}
    except OSError:
        return
    if all(map(is_loopback, found)):
        raise ConfigError(
            f"--rdzv-endpoint: {host} is {listed(sorted(found))} on this machine, which no other node reaches: name "
            "the host as the other nodes do, or set --rdzv-conf is_host=true for one launcher and is_host=false for "
            "the others"
        )


def host_answers(host: str, port: int) -> bool:
    """Return True if a host answers at this address, with a listening process or without."""
    try:
        socket.create_connection((host, port), timeout=_ALIVE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def take_endpoint(host: str, port: int) -> socket.socket | None:
    """Listen at the endpoint, which is this machine; 0 is any free port. None if a coordinator answers there already,
    where the other nodes look for it: of several launchers on one machine one is the first, and one that is started
    again may find the old coordinator.

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
        kinds = [_ask(address, port, begun_s + ANSWER_S - now_s).kind for address in peers_addresses(host)]
        if _Kind.COORDINATOR in kinds:
            return None
        if _Kind.OVER in kinds:
            doubted_s = None
        elif doubted_s is None:
            doubted_s = now_s
        is_certain = doubted_s is not None and time.monotonic() - doubted_s >= CERTAIN_S
        if is_certain or time.monotonic() - begun_s >= ANSWER_S:
            raise ConfigError(_taken(host, port))
        time.sleep(_PAUSE_S)


def _taken(host: str, port: int) -> str:
    """Return the line for the user: what has the port."""
    found = []
    for holder in holders(port):
        answer = _ask("" if holder.host in ("::", "0.0.0.0") else holder.host, port, ANSWER_S)
        is_ours = answer.kind in (_Kind.COORDINATOR, _Kind.OVER)
        what = f"a coordinator of job {printable(answer.job) or 'unknown'}" if is_ours else "another program"
        found.append(f"{what} ({holder})")
    who = listed(found or ["another program"])
    return (
        f"{who} has the port of the rendezvous endpoint {host}:{port} on this machine: end it, or choose another port"
    )


def _ask(host: str, port: int, within_s: float) -> _Answer:
    """Find out what answers at a port of this machine."""
    until_s = time.monotonic() + within_s
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError:
        return _Answer(_Kind.OTHER)
    with sock:
        sock.settimeout(max(0.01, within_s))
        try:
            sock.connect((host or "127.0.0.1", port))
            peer = tcp.Peer(sock, allowance=HANDSHAKE_BYTES)
            peer.write(encode(Ask()))
            while peer.is_open and (left_s := until_s - time.monotonic()) > 0:
                peer.flush()
                select.select([sock], [], [], left_s)
                for message in map(HANDSHAKE.parse, peer.read()):
                    if isinstance(message, Open | Challenge):
                        return _Answer(_Kind.OVER if message.over else _Kind.COORDINATOR, message.job)
                    return _Answer(_Kind.OTHER)
        except VersionError:
            return _Answer(_Kind.COORDINATOR)  # of another version: a launcher that connects to it is refused
        except ConnectionRefusedError:
            return _Answer(_Kind.NOBODY)
        except (OSError, ProtocolError):
            return _Answer(_Kind.OTHER)
    return _Answer(_Kind.OTHER)


def peers_addresses(host: str) -> list[str]:
    """Return this machine's addresses at which other nodes connect to the endpoint."""
    if is_loopback(host):
        return [_bind_host(host)]
    try:
        found = [str(address[0]) for *_, address in tcp.look_up(host, 0)]
    except OSError:
        found = []
    # a machine may know itself by a loopback address (127.0.1.1), and others know it by another one
    routed = [each for each in dict.fromkeys(found) if not is_loopback(each)]
    return routed or [own_end(socket.AF_INET, _ELSEWHERE) or "127.0.0.1"]


def is_own_address(family: int, address: tuple[Any, ...]) -> bool:
    """Return True if the kernel reaches this address from the same address, as it does its own."""
    return is_loopback(address[0]) or own_end(family, (address[0], 9, *address[2:])) == address[0]


def own_end(family: int, address: tuple[Any, ...]) -> str | None:
    """Return the address from which this machine reaches that one; None if there is no way. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """Return True if this name or address is any machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_host(host: str) -> str:
    """Return the host to listen on for launchers that connect to ``host``: loopback if none comes from elsewhere."""
    if not is_loopback(host):
        return ""
    return "127.0.0.1" if host == "localhost" else host
