"""The user's command line: read by `arguments`, used everywhere in the launcher."""

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
"""The node health service's share of the checks' time: a slow service is reported as such."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The user's command line. Durations are seconds."""

    namespace: argparse.Namespace
    options: ResolvedOptions
    signals: tuple[signal.Signals, ...]
    signals_are_default: bool
    min_nodes: int
    max_nodes: int
    term_timeout: float
    stop_timeout: float
    restart_grace: float
    """``stop_timeout`` for ranks that are restarted because one of them has failed. Short unless set by the user:
    without that rank nothing can be saved together any more, and each second counts."""
    given: frozenset[str] = frozenset()
    """Options that the user gave, among those whose being given matters, as an option or a PET_ variable."""
    node_rank: int | None = None
    """Rank of this node; None if not given, although torchrun's default is 0."""
    where: SchedulerEnvironment = SchedulerEnvironment()  # noqa: RUF009 - frozen
    taken: str = ""
    """Options taken from the scheduler, for the user; empty if none."""

    @property
    def run_id(self) -> str:
        """torchrun's --rdzv-id, generated for a single node."""
        return str(self.namespace.rdzv_id)

    @property
    def stopped_code(self) -> int | None:
        """Exit code of a launcher that was asked to stop; None: decided by how its ranks have ended.

        For Kubernetes, 0 is the end of the training, but a pod whose node is drained has more to do.
        """
        chosen = self.options.stopped_exit_code
        return 128 + signal.SIGTERM if chosen is None and self.where.scheduler is Scheduler.KUBERNETES else chosen

    @property
    def says_all(self) -> bool:
        """True if this launcher prints lines about the whole job even if another one does."""
        chosen = self.options.say
        return self.where.scheduler is Scheduler.KUBERNETES if chosen is None else chosen == "all"

    @property
    def save_signals(self) -> tuple[signal.Signals, ...]:
        """Signals that Slurm's users request before the end of the time limit; without a handler, ranks are asked to
        stop."""
        if self.where.scheduler is not Scheduler.SLURM:
            return ()
        return tuple({signal.SIGUSR1, signal.SIGUSR2} - {*self.signals, *self.options.forward_signals})

    @property
    def node_health_command(self) -> str | None:
        """Command that decides if this node is fit."""
        return node_health_command(self.options)

    @property
    def rendezvous_settings(self) -> dict[str, str]:
        """Settings of --rdzv-conf."""
        return rendezvous_settings(self.namespace)

    @property
    def ranks_are_python(self) -> bool:
        """True if a rank's first process is the user's Python script, not a command that may wrap it."""
        return not self.namespace.no_python


def rendezvous_settings(namespace: argparse.Namespace) -> dict[str, str]:
    """Return the settings of --rdzv-conf, by name."""
    pairs = (pair.partition("=") for pair in str(namespace.rdzv_conf or "").split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}


def node_health_command(options: LauncherOptions) -> str | None:
    """Return the shell command: ``--ft-node-health-check-endpoint`` first, then the user's command; None without
    either."""
    endpoint, own = options.node_health_check_endpoint, options.node_health_command
    if endpoint is None:
        return own
    seconds = (options.node_health_timeout or _HEALTH_TIMEOUT_S) * _SERVICE_SHARE
    asks = shlex.join([sys.executable, "-m", "megatron_ft.cli.node_service", endpoint, f"{seconds:g}"])
    return asks if own is None else f"{asks} && {{ {own}\n}}"


def doubts_about_node_service(endpoint: str | None) -> list[str]:
    """Return why the service can't be asked, as far as known at the start.

    Raises:
        ConfigError: the endpoint isn't a socket path.
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
