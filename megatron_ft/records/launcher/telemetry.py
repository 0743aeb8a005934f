"""Telemetry of this launcher: its metrics, for Prometheus and node_exporter, and the user's command for events."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ft.config.launcher_options import LauncherOptions
from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.lives import Ending
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.file_queue import FileQueue, bounded_call
from megatron_ft.link.files.atomic_write import write_whole
from megatron_ft.link.reactor import Reactor
from megatron_ft.records.exposition import MetricsServer, as_text, check_installed
from megatron_ft.records.launcher.event_command import EventCommand
from megatron_ft.records.rules.metrics import GaugeValues, JobMetrics, NodeActivity, Series
from megatron_ft.records.rules.notifications import job_ended, notification

_WRITE_S = 15.0
"""Seconds between two writes of the file: Prometheus scrapes about as often."""
_LAST_WRITE_S = 2.0


class Telemetry:
    """The outputs that the user asked for; none of them holds up the launcher.

    Threads of their own serve the metrics and write their file.
    """

    def __init__(
        self,
        options: LauncherOptions,
        *,
        run_id: str,
        node: str,
        reactor: Reactor,
        say: Callable[[str], None],
    ) -> None:
        """Open them. ``node``: name of this node.

        Raises:
            ConfigError: a library is missing, a port is taken, or a directory doesn't exist.
        """
        self._run_id, self._node, self._say = run_id, node, say
        self._metrics = JobMetrics()
        self._readings: Callable[..., GaugeValues] | None = None
        self._shown: Sequence[Series] = ()
        """Replaced as a whole, because other threads read it."""
        self._path = options.metrics_textfile
        self._files = FileQueue()
        self._written_s = 0.0
        self._is_told = False
        self._server: MetricsServer | None = None
        self._command: EventCommand | None = None
        if self._path is not None:
            check_installed("--ft-metrics-textfile")
            folder = os.path.dirname(os.path.abspath(self._path))
            if not bounded_call(lambda: os.path.isdir(folder), True):
                raise ConfigError(f"--ft-metrics-textfile: {folder} is no directory")
        if options.metrics_port is not None:
            check_installed("--ft-metrics-port")
            host, _, port = options.metrics_port.rpartition(":")
            host = host.strip("[]")
            self._server = MetricsServer(host, int(port), lambda: self._shown)
            say(f"metrics: http://{host or node}:{self._server.port}/metrics")
        self._show(GaugeValues())
        if options.on_event is not None:
            self._command = EventCommand(options.on_event, reactor=reactor, say=say)

    def pids(self) -> set[int]:
        """Return the PIDs of processes started here."""
        return set() if self._command is None else self._command.pids()

    def hear(self, record: Record, *, is_spokesman: bool) -> None:
        """Take what the launcher writes to its event log. ``is_spokesman``: this launcher speaks for the job."""
        self._metrics.hear(record, self._node)
        if is_spokesman and self._command is not None and (told := notification(record)) is not None:
            self._tell(self._command, told)

    def look(self, readings: Callable[..., GaugeValues]) -> None:
        """Show the readings of now; the file is written if that is due.

        With ``is_last=True``, ``readings`` reads what its answer needs, however long it takes.
        """
        if self._path is not None or self._server is not None:
            self._readings = readings
            self._show(readings())

    def ended(self, ending: Ending, exit_code: int, cause: str) -> None:
        """Tell the end of the job."""
        if self._command is not None:
            self._tell(self._command, job_ended(ending, exit_code, cause))

    def close(self) -> None:
        """Bring out what is left, with bounds; a file server that hangs isn't waited for."""
        if self._command is not None:
            self._command.close()
        if self._path is not None:
            self._written_s = math.inf
            last = GaugeValues() if self._readings is None else self._readings(is_last=True)
            self._show(replace(last, nodes={self._node: NodeActivity.ENDED}, lags=()))
            self._files.do(self._write)
            self._files.finish(_LAST_WRITE_S)
        if self._server is not None:
            self._server.close()

    def _tell(self, command: EventCommand, told: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        command.tell({**told, "time": now, "run_id": self._run_id, "by": self._node})

    def _show(self, readings: GaugeValues) -> None:
        self._shown = tuple(self._metrics.series(readings, of_job=self._metrics.is_at_place_0))
        now_s = time.monotonic()
        if self._path is not None and now_s - self._written_s >= _WRITE_S and self._files.stands_for_s() == 0.0:
            self._written_s = now_s
            self._files.do(self._write)

    def _write(self) -> None:
        assert self._path is not None
        try:
            write_whole(self._path, as_text(lambda: self._shown), mode=0o644)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                self._say(f"metrics can't be written to {self._path}: {error.strerror}")
