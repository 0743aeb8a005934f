"""torch's side of the coordination: a rendezvous that hands out what was decided elsewhere.

Who meets, in which places, and when is the coordinator's work; torch's agent asks here for the cycle that has begun.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.launcher.coordination.rank_store import RankStore
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.link.tcp import parse_address

BACKEND = "megatron_ft"


class CoordinatedRendezvous(RendezvousHandler):
    """Rendezvous of one launcher at the coordinator. The coordinator ends jobs, and the launcher closes the store."""

    use_agent_store = True  # the ranks meet in a store of a launcher: none of them opens one

    def __init__(self, orders: CoordinatorView, store: RankStore, run_id: str) -> None:
        self._orders, self._store, self._run_id = orders, store, run_id

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the cycle that has begun. Waits for nothing but a connection to its store.

        Raises:
            RankStoreError: it can't connect.
        """
        held = self._orders.begun
        assert held is not None, "no cycle has begun"
        assert held.place is not None, "this node has no place in the cycle"
        store = self._store.connect(held.store)
        return RendezvousInfo(store, held.place, held.decision.world, RendezvousStoreInfo(*parse_address(held.store)))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # torch need not restart ranks for waiting nodes

    def shutdown(self) -> bool:
        return True


_last: list[tuple[CoordinatorView, RankStore]] = []
"""Orders and store of the launcher that has registered last, alone."""


def register(config: LaunchConfig, *, orders: CoordinatorView, store: RankStore) -> None:
    """Have the job that is launched with ``config`` meet by the coordinator's ``orders``.

    torch has one registry for the whole process, in which a name can't be given to another.
    """
    _last[:] = [(orders, store)]
    rendezvous_handler_registry.register(BACKEND, _create)
    config.rdzv_backend, config.rdzv_configs = BACKEND, {}  # torch logs them: a password of etcd may be among them


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return CoordinatedRendezvous(*_last[0], parameters.run_id)
