"""torch's side of the coordination: a rendezvous that hands out what was decided elsewhere.

Who meets, in which places, and when is the coordinator's work; torch's agent asks here for the cycle that has begun.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.core.agent.coordinator_view import CoordinatorView
from megatron_ft.launcher.coordination.rank_store import RankStore, RankStoreError
from megatron_ft.link.tcp import parse_address

BACKEND = "megatron_ft"


class CoordinatedRendezvous(RendezvousHandler):
    """Rendezvous of one launcher at the coordinator."""

    def __init__(self, orders: CoordinatorView, store: RankStore, run_id: str) -> None:
        self._orders = orders
        self._store = store
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in a store of a launcher: none of them opens one."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the cycle that has begun. Waits for nothing but a connection to its store.

        Raises:
            RendezvousConnectionError: it can't connect.
        """
        held = self._orders.begun
        assert held is not None, "no cycle has begun"
        assert held.place is not None, "this node has no place in the cycle"
        try:
            store = self._store.connect(held.store)
        except RankStoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return RendezvousInfo(store, held.place, held.decision.world, RendezvousStoreInfo(*parse_address(held.store)))

    def is_closed(self) -> bool:
        """Never: the coordinator ends jobs."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: torch need not restart ranks for waiting nodes."""
        return 0

    def shutdown(self) -> bool:
        """Return True and do nothing: the launcher closes what it has opened."""
        return True


_make: list[Callable[[RendezvousParameters], RendezvousHandler]] = []
"""Factory of the last registration, alone."""


def register(config: LaunchConfig, *, orders: CoordinatorView, store: RankStore) -> None:
    """Have the job that is launched with ``config`` meet by the coordinator's ``orders``.

    torch has one registry for the whole process, in which a name can't be given to another: what is registered is
    ``_create``, which makes what was asked for last.
    """
    _make[:] = [lambda parameters: CoordinatedRendezvous(orders, store, parameters.run_id)]
    rendezvous_handler_registry.register(BACKEND, _create)
    config.rdzv_backend, config.rdzv_configs = BACKEND, {}  # torch logs them: a password of etcd may be among them


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return _make[0](parameters)
