"""torch's rendezvous, which hands out what was decided elsewhere, and the store in which the ranks of a cycle meet.

Who meets, in which places, and when is the coordinator's work. The store is torch's TCPStore in the launcher at place
0, fresh for each cycle: ranks that find the last cycle's words in it would try addresses of dead ranks.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.errors import FaultToleranceError
from megatron_ft.job.endpoint import HERE
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.link.base.wording import printable
from megatron_ft.link.tcp import format_address, parse_address

BACKEND = "megatron_ft"
CONNECT_S = 30.0
_FILES = 16
"""More than the server opens, and the client that it makes at once."""
_WAIT_S = 300.0
"""Seconds this launcher waits in the store for another one's value: torch's own default."""


class RankStoreError(FaultToleranceError, RendezvousConnectionError):
    """The store of the ranks can't be opened or reached."""


class CoordinatedRendezvous(RendezvousHandler):
    """Rendezvous of one launcher at the coordinator: the store's server at place 0, a client elsewhere.

    ``close_store`` may be called while another thread waits in ``connect`` or in what it returned: at place 0 that wait
    ends with an error. A store that another thread is opening then lives as long as the process.

    Args:
        config: of torch's launcher, which is to meet here.
        host: where others reach this machine.
        port: of the store, where the user has named one.
    """

    use_agent_store = True  # the ranks meet in a store of a launcher: none of them opens one
    orders: CoordinatorView

    def __init__(self, config: LaunchConfig, host: str, port: int = 0) -> None:
        self._config, self._host, self._port = config, host, port
        self._server: TCPStore | None = None
        self._address = ""
        config.rdzv_backend, config.rdzv_configs = BACKEND, {"handler": self}  # torch logs them: no password of etcd

    def open_store(self) -> str:
        """Open a fresh server in place of the last one; returns the address at which others reach it.

        Opening takes milliseconds, or as long as a name server is silent: torch asks for the names of loopback
        addresses.

        Raises:
            RankStoreError, OSError: the port isn't free; no file can be opened.
        """
        self.close_store()
        with contextlib.ExitStack() as opened:
            for _ in range(_FILES):  # torch aborts the process, or tries for half a minute, where it can't
                opened.enter_context(open(os.devnull, "rb"))
        where = f"port {self._port}" if self._port else "any port"
        self._server = _store(HERE, self._port, f" can't listen on {where}", is_server=True)
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
        client = _store(HERE if address == self._address else host, port, f", {address}, can't be reached")
        client.set_timeout(timedelta(seconds=_WAIT_S))
        return client

    def close_store(self) -> None:
        """End the server, if there is one, and give its port back. Clients get errors from then on."""
        self._server, self._address = None, ""

    # -- what torch's agent asks ------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the cycle that has begun. Waits for nothing but a connection to its store.

        Raises:
            RankStoreError: it can't connect.
        """
        held = self.orders.begun
        assert held is not None, "no cycle has begun"
        assert held.place is not None, "this node has no place in the cycle"
        store = self.connect(held.store)
        return RendezvousInfo(store, held.place, held.decision.world, RendezvousStoreInfo(*parse_address(held.store)))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._config.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # torch need not restart ranks for waiting nodes

    def shutdown(self) -> bool:
        return True  # the coordinator ends jobs, and the launcher closes the store


# torch has one registry for the whole process, in which a name can't be given to another
rendezvous_handler_registry.register(BACKEND, lambda parameters: parameters.config["handler"])


def _store(host: str, port: int, problem: str, *, is_server: bool = False) -> TCPStore:
    try:
        timeout = timedelta(seconds=CONNECT_S)
        return TCPStore(host, port, is_master=is_server, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:
        text = printable(str(error).partition("\n")[0])  # C++ frames follow
        raise RankStoreError(f"the store for the ranks{problem}: {text}") from error
