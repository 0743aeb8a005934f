"""Telemetry of this launcher: its metrics, and the user's command for events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ft.config.launcher_options import LauncherOptions
from megatron_ft.job.rules.lives import Ending
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.reactor import Reactor
from megatron_ft.records.launcher.event_command import EventCommand
from megatron_ft.records.launcher.metrics_output import MetricsOutput, NodeReader
from megatron_ft.records.rules.notifications import job_ended, notification


class Telemetry:
    """The outputs that the user asked for; none of them holds up the launcher."""

    def __init__(
        self,
        options: LauncherOptions,
        *,
        run_id: str,
        node: str,
        reactor: Reactor,
        setpriv: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        """Open them. ``node``: name of this node.

        Raises:
            ConfigError: one can't be had.
        """
        self._about = {"run_id": run_id, "by": node}
        self._metrics: MetricsOutput | None = None
        self._command: EventCommand | None = None
        if options.metrics_port is not None or options.metrics_textfile is not None:
            self._metrics = MetricsOutput(options, node=node, say=say)
        if options.on_event is not None:
            self._command = EventCommand(options.on_event, reactor=reactor, say=say, setpriv=setpriv)

    def pids(self) -> set[int]:
        """Return the PIDs of processes started here."""
        return set() if self._command is None else self._command.pids()

    def hear(self, record: Record, *, is_spokesman: bool) -> None:
        """Take what the launcher writes to its event log. ``is_spokesman``: this launcher speaks for the job."""
        if self._metrics is not None:
            self._metrics.hear(record)
        if self._command is None:
            return
        told = notification(record)
        if told is not None and is_spokesman:
            self._tell(told)

    def look(self, node: NodeReader) -> None:
        """Show what this node's ranks are at now."""
        if self._metrics is not None:
            self._metrics.look(node)

    def ended(self, ending: Ending, exit_code: int, cause: str) -> None:
        """Tell the end of the job."""
        if self._command is not None:
            self._tell(job_ended(ending, exit_code, cause))

    def close(self) -> None:
        """Bring out what is left, with bounds."""
        for each in (self._command, self._metrics):
            if each is not None:
                each.close()

    def _tell(self, told: Mapping[str, Any]) -> None:
        assert self._command is not None
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._command.tell({**told, "time": now, **self._about})
