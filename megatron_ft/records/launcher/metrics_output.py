"""Metrics of this launcher: served to Prometheus, and written for node_exporter, by threads of their own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_ft.config.launcher_options import LauncherOptions, split_address
from megatron_ft.errors import ConfigError
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.file_queue import FileQueue, bounded_call
from megatron_ft.link.files.atomic_write import write_whole
from megatron_ft.records.exposition import MetricsServer, as_text, check_installed
from megatron_ft.records.rules.metrics import GaugeValues, JobMetrics, NodeActivity, Series

_WRITE_S = 15.0
"""Seconds between two writes of the file: Prometheus scrapes about as often."""
_LAST_WRITE_S = 2.0


class NodeReader(Protocol):
    """What is read of this node."""

    def readings(self, *, is_last: bool = False) -> GaugeValues:
        """Return what the metrics show of this node now; ``is_last``: however long it takes."""


class MetricsOutput:
    """Keeps the counters, and shows them with the newest readings of this node."""

    def __init__(self, options: LauncherOptions, *, node: str, say: Callable[[str], None]) -> None:
        """Begin to serve, and to write.

        Raises:
            ConfigError: a library is missing, a port is taken, or a directory doesn't exist.
        """
        self._node = node
        self._say = say
        self._metrics = JobMetrics()
        self._reader: NodeReader | None = None
        self._shown: Sequence[Series] = ()
        """Replaced as a whole, because other threads read it."""
        self._path = options.metrics_textfile
        self._files = FileQueue()
        self._written_s = 0.0
        self._is_told = False
        self._server: MetricsServer | None = None
        if self._path is not None:
            check_installed("--ft-metrics-textfile")
            folder = os.path.dirname(os.path.abspath(self._path))
            if not bounded_call(lambda: os.path.isdir(folder), True):
                raise ConfigError(f"--ft-metrics-textfile: {folder} is no directory")
        if options.metrics_port is not None:
            check_installed("--ft-metrics-port")
            host, port = split_address(options.metrics_port)
            self._server = MetricsServer(host, port, self._collect)
            say(f"metrics: http://{host or node}:{self._server.port}/metrics")
        self._show(GaugeValues())

    def hear(self, record: Record) -> None:
        """Count a record of this launcher."""
        self._metrics.hear(record, self._node)

    def look(self, node: NodeReader) -> None:
        """Show the readings of now; the file is written if that is due."""
        self._reader = node
        self._show(node.readings())

    def _show(self, readings: GaugeValues) -> None:
        self._shown = tuple(self._metrics.series(readings, of_job=self._metrics.is_at_place_0))
        now_s = time.monotonic()
        if self._path is not None and now_s - self._written_s >= _WRITE_S and self._files.stands_for_s() == 0.0:
            self._written_s = now_s
            self._files.do(self._write)

    def close(self) -> None:
        """Show that the job is over for this node, and stop. A file server that hangs isn't waited for."""
        if self._path is not None:
            self._written_s = math.inf
            last = GaugeValues() if self._reader is None else self._reader.readings(is_last=True)
            self._show(replace(last, nodes={self._node: NodeActivity.ENDED}, lags=()))
            self._files.do(self._write)
            self._files.finish(_LAST_WRITE_S)
        if self._server is not None:
            self._server.close()

    def _collect(self) -> Sequence[Series]:
        return self._shown

    def _write(self) -> None:
        assert self._path is not None
        try:
            write_whole(self._path, as_text(self._collect), mode=0o644)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                self._say(f"metrics can't be written to {self._path}: {error.strerror}")
