"""From a cycle that has begun to its ranks: the nodes' ranks are numbered, and this node's are made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes import numa
from megatron_ft.launcher.processes.worker import Worker, WorkerContext
from megatron_ft.launcher.spawn.rank_logs import CycleLogs
from megatron_ft.launcher.torch_compat import private_names

__all__ = ["make_context", "meet", "start"]

_MET = ("workers", "store", "group_rank", "group_world_size", "master_addr", "master_port")


def meet(
    rendezvous: Callable[[WorkerGroup], None], group: WorkerGroup, *, node: Node, check: Callable[[], None]
) -> None:
    """Let torch number the ranks, in the store of the cycle. ``check`` is called meanwhile, after each event.

    Raises:
        RendezvousError: the store, or the nodes, can't be reached.
        whatever ``check`` raises.
    """
    # into one of its own: a thread that is given up may come back from where it waits while the next cycle runs
    met = WorkerGroup(group.spec)

    def number_ranks() -> None:
        try:
            rendezvous(met)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's for stores, whatever it is
            raise RendezvousConnectionError("The store of the ranks can't be reached.") from error

    node.reactor.call_blocking(number_ranks, check)
    private_names.warn_of_no_lost_connections()  # until now they say why a host can't be reached
    for name in _MET:
        setattr(group, name, getattr(met, name))


def make_context(
    node: Node,
    *,
    on_start: Callable[[Worker], None],
    on_exit: Callable[[Worker], None],
    envs: dict[int, dict[str, str]],
    **given: Any,
) -> WorkerContext:
    """The ranks of this node, not started. ``given`` is what torch gives to its ``start_processes``."""
    given.pop("start_method", None)
    specs = CycleLogs(
        given.pop("logs_specs"),
        run_dir=node.run_dir,
        say=node.say,
        blocking=node.stop.blocking,
        prefix=node.line.options.per_cycle_applog_prefix,
    )
    context = WorkerContext(
        spawner=node.spawner,
        environment=node.rank_environment(),
        reactor=node.reactor,
        end=node.ending.end,
        on_start=on_start,
        on_exit=on_exit,
        prefix=lambda local_rank: numa.prefix(local_rank, strict=node.line.options.numa_bind_strict),
        envs=envs,
        logs_specs=specs,
        **given,
    )
    private_names.add_tail_logs(context, specs.copied)
    return context


def start(context: WorkerContext) -> None:
    """Start them.

    Raises:
        FaultToleranceError: that can't be done.
    """
    try:
        context.start()
    except (OSError, subprocess.SubprocessError) as error:
        raise FaultToleranceError(f"the ranks can't be started: {error}") from error
