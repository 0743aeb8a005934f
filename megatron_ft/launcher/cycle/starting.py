"""Start of a cycle's ranks: torch numbers those of all nodes; this node's get their environment and are made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker as TorchWorker
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from megatron_ft.core.config.launcher_options import OFF
from megatron_ft.core.rank_variables import WATCH_VARIABLE
from megatron_ft.job.rules.rotation import rotated
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.rank_environment import rank_environment
from megatron_ft.launcher.base.run_directory import RunDirectory
from megatron_ft.launcher.base.signals import StopRequests
from megatron_ft.launcher.cycle import reference_names
from megatron_ft.launcher.cycle.control_socket import ControlSocket
from megatron_ft.launcher.monitors.monitors import Monitors
from megatron_ft.launcher.processes.rank_logs import CycleLogs
from megatron_ft.launcher.processes.termination import Termination
from megatron_ft.launcher.processes.worker import Spawn, Worker
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.launcher.torch_compat.worker_context import WorkerContext
from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.launcher.keeper_process import Keeper
from megatron_ft.run_ahead.forking_spawner import ForkingSpawner

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


@dataclass(frozen=True, kw_only=True)
class RankStarter:
    """Starter of this node's ranks, with the processes and services of its launcher."""

    line: CommandLine
    reactor: Reactor
    stop: StopRequests
    say: Callable[[str], None]
    run_dir: RunDirectory
    monitors: Monitors
    control: ControlSocket
    keeper: Keeper
    forking: ForkingSpawner | None
    """Spawner that forks ranks; None if ranks are never forked."""
    spawn: Spawn
    termination: Termination

    def prepare(
        self,
        *,
        cycle: int,
        waiting_s: float,
        restarts_left: int,
        on_start: Callable[[Worker], None],
        on_exit: Callable[[Worker], None],
        envs: dict[int, dict[str, str]],
        **given: Any,
    ) -> WorkerContext:
        """Return the ranks of a cycle, not started, for which this node has waited ``waiting_s`` seconds.

        ``given``: torch's arguments of ``start_processes``.

        Nodes that join or leave restart ranks, too, so a job of several nodes always expects a restart.
        """
        self.run_dir.mend()
        infra_rank = reference_names.infra_rank(self.line, os.environ)
        ours = reference_names.variables(cycle, time.time(), waiting_s, infra_rank)
        ours |= {"FT_LAUNCHER_IPC_SOCKET": self.control.path, "FT_CYCLE": str(cycle), **self.keeper.variables()}
        ours[WATCH_VARIABLE] = "on" if self.line.options.watch_collectives.how != OFF else "off"
        for local_rank, env in envs.items():
            env.update(ours)
            env["FT_RANK_MONITOR_IPC_SOCKET"] = self.monitors[local_rank].socket_path
        if self.forking is not None:
            self.forking.expects_restart = restarts_left > 0 or self.line.max_nodes > 1
        given.pop("start_method", None)
        specs = CycleLogs(
            given.pop("logs_specs"),
            run_dir=self.run_dir.path,
            say=self.say,
            blocking=self.stop.blocking,
            prefix=self.line.options.per_cycle_applog_prefix,
        )
        return WorkerContext(
            spawn=self.spawn,
            environment=shared_environment(self.line),
            reactor=self.reactor,
            end=self.termination.end,
            on_start=on_start,
            on_exit=on_exit,
            envs=envs,
            logs_specs=specs,
            **given,
        )
