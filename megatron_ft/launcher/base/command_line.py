"""The user's command line: read by `arguments`, used everywhere in the launcher."""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import dataclass

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.config.launcher_options import OFF
from megatron_ft.launcher.base.rank_environment import rank_environment
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment

SAYS_ALL_VARIABLE = "MEGATRON_FT_SAYS_ALL"
"""Set to 1 by a program that reads the output of each launcher (our tests)."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The user's command line. Durations are seconds."""

    namespace: argparse.Namespace
    options: FaultToleranceConfig
    signals: tuple[signal.Signals, ...]
    signals_are_default: bool
    min_nodes: int
    max_nodes: int
    node_rank: int | None = None
    """Rank of this node; None if not given, although torchrun's default is 0."""
    where: SchedulerEnvironment = SchedulerEnvironment()  # noqa: RUF009 - frozen
    is_named: bool = False
    """The user has named the job (``--rdzv-id``)."""
    taken: str = ""
    """Options taken from the scheduler, for the user; empty if none."""
    began_s: float = 0.0
    """When this launcher was started, by `time.monotonic`. Its process may be older: a shell that became it, or the
    caller of `main`."""

    def rank_environment(self) -> dict[str, str]:
        """Return the common environment of this node's ranks."""
        is_served, watches = self.options.reference_names == "on", self.options.watch_collectives.how != OFF
        return rank_environment(os.environ, reference_names=is_served, watches=watches)

    @property
    def run_id(self) -> str:
        """torchrun's --rdzv-id, generated for a single node."""
        return str(self.namespace.rdzv_id)

    @property
    def says_all(self) -> bool:
        """True if this launcher prints what concerns the whole job, though another one does, too."""
        return self.where.are_pods or os.environ.get(SAYS_ALL_VARIABLE) == "1"

    @property
    def save_signals(self) -> tuple[signal.Signals, ...]:
        """Signals that users request before the end of the time limit; without a handler, ranks are asked to stop."""
        return tuple({*self.where.save_signals} - {*self.signals, *self.options.forward_signals})

    @property
    def rendezvous_settings(self) -> dict[str, str]:
        """Settings of --rdzv-conf."""
        return rendezvous_settings(self.namespace)


def rendezvous_settings(namespace: argparse.Namespace) -> dict[str, str]:
    """Settings of --rdzv-conf by name. Quotes around all of it come from a program that started no shell."""
    text = str(namespace.rdzv_conf or "").strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}
