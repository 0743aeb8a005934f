"""Which process of this machine listens at a TCP port, as far as /proc shows it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_ft.ipc.linux.processes import read_stat

_LISTENS = "0A"
_WORD_BYTES = 4


@dataclass(frozen=True)
class PortHolder:
    """A listening socket.

    Args:
        host: address that it is bound to; "0.0.0.0" or "::" for all addresses.
        pid: process id of a process that has the socket; None if no such process may be looked at.
        program: name of that process; empty if unknown.
    """

    host: str
    pid: int | None = None
    program: str = ""

    def __str__(self) -> str:
        who = "a process of another user or container" if self.pid is None else f"{self.program}, pid {self.pid}"
        return f"{who}, listening on {'all addresses' if self.host in ('::', '0.0.0.0') else self.host}"


def holders(port: int) -> list[PortHolder]:
    """Return who listens at that port, in this network namespace."""
    inodes = {inode: host for table in ("tcp", "tcp6") for host, inode in _listening(table, port)}
    pids = _pids_with(inodes.keys()) if inodes else {}
    return [PortHolder(host, *pids.get(inode, (None, ""))) for inode, host in inodes.items()]


def _listening(table: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield the address and the inode of each listening socket."""
    try:
        with open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return
    for row in rows:
        address, _, at = row[1].partition(":")
        if row[3] == _LISTENS and int(at, 16) == port:
            yield _host(address), row[9]


def _host(text: str) -> str:
    """Return an address that the kernel has printed as 32-bit words in the machine's byte order."""
    size = 2 * _WORD_BYTES
    packed = b"".join(struct.pack("=I", int(text[at : at + size], 16)) for at in range(0, len(text), size))
    return socket.inet_ntop(socket.AF_INET if len(packed) == _WORD_BYTES else socket.AF_INET6, packed)


def _pids_with(inodes: Collection[str]) -> dict[str, tuple[int, str]]:
    """Return a process, and its name, for each of these sockets that one has which this user may look at."""
    found: dict[str, tuple[int, str]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for inode in _sockets_of(pid):
            if inode in inodes and inode not in found:
                stat = read_stat(int(pid))
                found[inode] = int(pid), "" if stat is None else stat.comm
    return found


def _sockets_of(pid: str) -> Iterator[str]:
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # it has ended, or is another user's
    for fd in fds:
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]")
