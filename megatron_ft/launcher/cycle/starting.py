"""Start of a cycle's ranks: torch numbers those of all nodes; this node's get their environment and are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch.distributed.elastic.agent.server.api import Worker as TorchWorker
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from megatron_ft.config.launcher_options import OFF
from megatron_ft.job.rules.rotation import rotated
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.rank_environment import rank_environment
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.link.reactor import Reactor

_MET = ("workers", "store", "group_rank", "group_world_size", "master_addr", "master_port")


def meet(
    rendezvous: Callable[[WorkerGroup], None], group: WorkerGroup, *, reactor: Reactor, check: Callable[[], None]
) -> None:
    """Let torch number the ranks, in the store of the cycle. ``check`` is called after each event.

    Raises:
        RendezvousError: the store, or the nodes, can't be reached.
        any exception of ``check``.
    """
    # a separate group: an abandoned thread may return from its wait while the next cycle runs
    met = WorkerGroup(group.spec)

    def number_ranks() -> None:
        try:
            rendezvous(met)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch raises it for every error of a store
            raise RendezvousConnectionError("The store of the ranks can't be reached.") from error

    reactor.call_blocking(number_ranks, check)
    private_names.warn_of_no_lost_connections()  # until now such warnings tell why a host can't be reached
    for name in _MET:
        setattr(group, name, getattr(met, name))


def rotate(workers: Sequence[TorchWorker], shift: int) -> None:
    """Give each process the rank of the one that is ``shift`` places further on this node; its LOCAL_RANK stays."""
    ranks = rotated([(worker.global_rank, worker.role_rank) for worker in workers], shift)
    for worker, (rank, role_rank) in zip(workers, ranks, strict=True):
        worker.global_rank, worker.role_rank = rank, role_rank


def shared_environment(line: CommandLine) -> dict[str, str]:
    """Return the common environment of this node's ranks."""
    options = line.options
    is_served = options.reference_names == "on"
    return rank_environment(os.environ, reference_names=is_served, watches=options.watch_collectives.how != OFF)
