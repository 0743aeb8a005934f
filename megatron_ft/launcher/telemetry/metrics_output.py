"""Metrics of this launcher: served to Prometheus, and written for node_exporter, by threads of their own."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.config.launcher_options import LauncherOptions
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.monitor import Minute
from megatron_ft.core.goodput.classify import Goodput
from megatron_ft.core.telemetry.live_goodput import LiveGoodput
from megatron_ft.core.telemetry.metrics import GaugeValues, JobMetrics, NodeActivity, Series
from megatron_ft.ipc.files.atomic_write import write_whole
from megatron_ft.ipc.telemetry.exposition import MetricsServer, as_text, check_installed
from megatron_ft.link.file_queue import FileQueue, bounded_call

_WRITE_S = 15.0
"""Seconds between two writes of the file: Prometheus scrapes about as often."""
_LAST_WRITE_S = 2.0
_JUDGE_S, _JUDGE_SELDOM = 5.0, 50.0
"""Least seconds between two sums of the goodput, and the same as a multiple of what the last one took."""


class NodeReader(Protocol):
    """What is read of the ranks of this node, by local rank."""

    def readings(self) -> GaugeValues:
        """Return what the metrics show of this node now."""

    def boards(self) -> Mapping[int, BoardSnapshot]:
        """Return the boards of the last cycle."""


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
        self._live = LiveGoodput(time.monotonic_ns())
        self._goodput: Goodput | None = None
        self._judging = FileQueue()
        self._judge_s = 0.0
        """When to sum up the goodput next, in that thread: time.monotonic."""
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
        if options.metrics_address is not None:
            check_installed("--ft-metrics-port")
            host, port = options.metrics_address
            self._server = MetricsServer(host, port, self._collect)
            say(f"metrics: http://{host or node}:{self._server.port}/metrics")
        self._show(GaugeValues())

    def hear(self, record: Record, at_ns: int) -> None:
        """Count a record of this launcher."""
        self._metrics.hear(record, self._node)
        self._live.hear(record, at_ns)

    def count_sections(self, minute: Minute) -> None:
        """Count the sections of a minute of this node's ranks."""
        self._metrics.count_sections(minute)

    def look(self, node: NodeReader) -> None:
        """Show the readings of now; the file is written if that is due."""
        boards = node.boards()
        self._live.look(boards.values())
        if self._metrics.is_at_place_0 and time.monotonic() >= self._judge_s:
            self._judge_s = math.inf  # until the thread is through with it
            self._judging.do(functools.partial(self._judge, self._live.ask(boards.values(), time.monotonic_ns())))
        self._show(node.readings())

    def _judge(self, ask: Callable[[], Goodput | None]) -> None:
        began_s = time.monotonic()
        self._goodput = ask()
        now_s = time.monotonic()
        self._judge_s = now_s + max(_JUDGE_S, _JUDGE_SELDOM * (now_s - began_s))

    def _show(self, readings: GaugeValues) -> None:
        readings = replace(readings, goodput=self._goodput)
        self._shown = tuple(self._metrics.series(readings, of_job=self._metrics.is_at_place_0))
        now_s = time.monotonic()
        if self._path is not None and now_s - self._written_s >= _WRITE_S and self._files.stands_for_s() == 0.0:
            self._written_s = now_s
            self._files.do(self._write)

    def close(self) -> None:
        """Show that the job is over for this node, and stop. A file server that hangs isn't waited for."""
        if self._path is not None:
            self._written_s = math.inf
            self._show(GaugeValues(nodes={self._node: NodeActivity.ENDED}))
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
