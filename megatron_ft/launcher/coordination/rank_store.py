"""The store in which the ranks of one cycle meet: torch's TCPStore, in the launcher at place 0, fresh for each cycle.

Ranks that find the last cycle's words in it would try addresses of dead ranks.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from megatron_ft.errors import FaultToleranceError
from megatron_ft.link.base.wording import printable
from megatron_ft.link.tcp import format_address, parse_address

_HERE = "127.0.0.1"
CONNECT_S = 30.0
_FILES = 16
"""More than the server opens, and the client that it makes at once."""
_WAIT_S = 300.0
"""Seconds this launcher waits in the store for another one's value: torch's own default."""


class RankStoreError(FaultToleranceError, RendezvousConnectionError):
    """The store of the ranks can't be opened or reached."""


class RankStore:
    """One launcher's part in it: the server at place 0, a client elsewhere.

    ``close`` may be called while another thread waits in ``connect`` or in what it returned: at place 0 that wait ends
    with an error. A store that another thread is opening then lives as long as the process.
    """

    def __init__(self, host: str, *, address: str = "") -> None:
        """Others reach this machine at ``host``.

        Args:
            address: ``host:port`` where the user wants it, in a job of one node; empty if he has named none.
        """
        self._host, self._port = parse_address(address) if address else (host, 0)
        self._server: TCPStore | None = None
        self._address = ""

    def open(self) -> str:
        """Open a fresh server in place of the last one; returns the address at which others reach it.

        Opening takes milliseconds, or as long as a name server is silent: torch asks for the names of loopback
        addresses.

        Raises:
            RankStoreError: the port isn't free.
        """
        self.close()
        try:
            with contextlib.ExitStack() as opened:
                for _ in range(_FILES):  # torch aborts the process, or tries for half a minute, where it can't
                    opened.enter_context(open(os.devnull, "rb"))
            self._server = _store(_HERE, self._port, is_server=True)
        except (RuntimeError, ValueError, OSError) as error:
            where = f"port {self._port}" if self._port else "any port"
            raise RankStoreError(f"the store for the ranks can't listen on {where}: {_first_line(error)}") from error
        self._address = format_address(self._host, self._server.port)
        return self._address

    def connect(self, address: str) -> TCPStore:
        """A client of the server at ``address``. May wait for half a minute.

        It doesn't keep a server of this launcher alive, however long it is kept itself.

        Raises:
            RankStoreError: the server can't be reached; ``address`` is empty.
        """
        if not address:
            raise RankStoreError("the ranks' store was lost with node 0's launcher: no other node has its address")
        host, port = parse_address(address)
        try:
            client = _store(_HERE if address == self._address else host, port, is_server=False)
        except (RuntimeError, ValueError, OSError) as error:
            raise RankStoreError(
                f"the store for the ranks, {address}, can't be reached: {_first_line(error)}"
            ) from error
        client.set_timeout(timedelta(seconds=_WAIT_S))
        return client

    def close(self) -> None:
        """End the server, if there is one, and give its port back. Clients get errors from then on."""
        self._server, self._address = None, ""


def _store(host: str, port: int, *, is_server: bool) -> TCPStore:
    return TCPStore(host, port, is_master=is_server, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False)


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0])  # C++ frames follow
