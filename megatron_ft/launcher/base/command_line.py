"""What the user asked for on the command line: read by `arguments`, and used everywhere in the launcher."""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import dataclass

from megatron_ft.ipc.config.options import ResolvedOptions
from megatron_ft.launcher.scheduler.environment import Scheduler, SchedulerEnvironment

SAYS_ALL_VARIABLE = "MEGATRON_FT_SAYS_ALL"
"""Set to 1 by a program that reads the output of each launcher (our tests)."""


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
    given: frozenset[str] = frozenset()
    """Options that the user gave, of those that mean something just by being given, as an option or a PET_ variable."""
    node_rank: int | None = None
    """None if it wasn't given; torchrun's default is 0."""
    where: SchedulerEnvironment = SchedulerEnvironment()  # noqa: RUF009 - frozen
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
        return 128 + signal.SIGTERM if self.where.scheduler is Scheduler.KUBERNETES else None

    @property
    def says_all(self) -> bool:
        """Whether this launcher prints what concerns the whole job, though another one does, too."""
        return self.where.scheduler is Scheduler.KUBERNETES or os.environ.get(SAYS_ALL_VARIABLE) == "1"

    @property
    def save_signals(self) -> tuple[signal.Signals, ...]:
        """Slurm's users have them sent before the time is over: they ask ranks that have no handler to stop."""
        if self.where.scheduler is not Scheduler.SLURM:
            return ()
        return tuple({signal.SIGUSR1, signal.SIGUSR2} - {*self.signals, *self.options.forward_signals})

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
