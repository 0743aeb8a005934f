"""What the user asked for on the command line: read by `arguments`, and used everywhere in the launcher."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from dataclasses import dataclass

from megatron_ft.core.config.launcher_options import LauncherOptions
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.node_service import socket_of
from megatron_ft.ipc.config.options import ResolvedOptions
from megatron_ft.launcher.scheduler.environment import Scheduler, SchedulerEnvironment

_HEALTH_TIMEOUT_S = 60.0
_SERVICE_SHARE = 0.8
"""Of the time that the checks have together, the node health service's share: a slow service is reported as such."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the user asked for. Durations are seconds."""

    namespace: argparse.Namespace
    options: ResolvedOptions
    signals: tuple[signal.Signals, ...]
    signals_are_default: bool
    min_nodes: int
    max_nodes: int
    term_timeout: float
    stop_timeout: float
    restart_grace: float
    """``stop_timeout`` for ranks that are restarted because one of them has failed. Unless the user has said how long,
    it is short: without that rank nothing can be saved together any more, and each second of it is one of the job's."""
    node_rank: int | None = None
    """None if it wasn't given; torchrun's default is 0."""
    where: SchedulerEnvironment = SchedulerEnvironment()  # noqa: RUF009 - frozen
    is_named: bool = False
    """The user has named the job (``--rdzv-id``)."""
    taken: str = ""
    """What was taken from the scheduler, for the user; empty if nothing."""

    @property
    def run_id(self) -> str:
        """torchrun's --rdzv-id, made up for a single node."""
        return str(self.namespace.rdzv_id)

    @property
    def stopped_code(self) -> int | None:
        """The exit code of a launcher that was asked to stop; None: by how its ranks have ended.

        Kubernetes takes 0 for the end of the training, and a pod whose node is drained has more to do.
        """
        chosen = self.options.stopped_exit_code
        return 128 + signal.SIGTERM if chosen is None and self.where.scheduler is Scheduler.KUBERNETES else chosen

    @property
    def says_all(self) -> bool:
        """Whether this launcher prints what concerns the whole job, though another one does, too."""
        chosen = self.options.say
        return self.where.scheduler is Scheduler.KUBERNETES if chosen is None else chosen == "all"

    @property
    def save_signals(self) -> tuple[signal.Signals, ...]:
        """Slurm's users have them sent before the time is over: they ask ranks that have no handler to stop."""
        if self.where.scheduler is not Scheduler.SLURM:
            return ()
        return tuple({signal.SIGUSR1, signal.SIGUSR2} - {*self.signals, *self.options.forward_signals})

    @property
    def node_health_command(self) -> str | None:
        """What says whether this node is fit."""
        return node_health_command(self.options)

    @property
    def rendezvous_settings(self) -> dict[str, str]:
        """What --rdzv-conf sets."""
        return rendezvous_settings(self.namespace)

    @property
    def ranks_are_python(self) -> bool:
        """Whether a rank's first process is the user's Python script, not some command that may wrap it."""
        return not self.namespace.no_python


def rendezvous_settings(namespace: argparse.Namespace) -> dict[str, str]:
    """What --rdzv-conf sets, by name."""
    pairs = (pair.partition("=") for pair in str(namespace.rdzv_conf or "").split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}


def node_health_command(options: LauncherOptions) -> str | None:
    """Asks ``--ft-node-health-check-endpoint``, then runs the user's own command, for /bin/sh; None without either."""
    endpoint, own = options.node_health_check_endpoint, options.node_health_command
    if endpoint is None:
        return own
    seconds = (options.node_health_timeout or _HEALTH_TIMEOUT_S) * _SERVICE_SHARE
    asks = shlex.join([sys.executable, "-m", "megatron_ft.cli.node_service", endpoint, f"{seconds:g}"])
    return asks if own is None else f"{asks} && {{ {own}\n}}"


def doubts_about_node_service(endpoint: str | None) -> list[str]:
    """Why that service can't be asked, as far as is known at the start.

    Raises:
        ConfigError: it isn't the socket of one.
    """
    if endpoint is None:
        return []
    try:
        path = socket_of(endpoint)
    except ValueError as error:
        raise ConfigError(f"--ft-node-health-check-endpoint: {error}") from None
    if importlib.util.find_spec("grpc") is None:
        return ["--ft-node-health-check-endpoint: the service isn't asked: the Python package grpcio isn't installed"]
    return [] if os.path.exists(path) else [f"--ft-node-health-check-endpoint: there is no {path} yet"]
