"""`megatron-ft exporter LOG_DIR`: metrics of a job whose nodes can't be scraped, from its event logs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.tensorboard import TensorBoardFiles
from megatron_ft.config.launcher_options import METRICS_PORT, split_address
from megatron_ft.link.facts.minutes import HEARTBEAT
from megatron_ft.records.exposition import MetricsServer, as_text, check_installed
from megatron_ft.records.rules.metrics import GaugeValues, JobMetrics, Series

if TYPE_CHECKING:
    from megatron_ft.cli.logs.runs import Run

_READ_S, _SELDOM = 15.0, 4.0
"""Least seconds between two readings, and the same as a multiple of what the last one took."""
_DEFAULT_PORT = "9466"


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "exporter",
        help="metrics of a job from its event logs, for Prometheus",
        description="Serves the metrics of the newest run in LOG_DIR, read anew every 15 seconds. docs/telemetry.md "
        "lists them.",
    )
    parser.add_argument("directory", metavar="LOG_DIR", help="directory that ft_launcher names as 'logs:'")
    parser.add_argument(
        "--port", default=_DEFAULT_PORT, metavar=METRICS_PORT.metavar, help=f"where to serve; default {_DEFAULT_PORT}"
    )
    parser.add_argument("--once", action="store_true", help="print the metrics and exit, for a file of node_exporter")
    parser.add_argument(
        "--tensorboard",
        metavar="DIR",
        help="also write goodput, step times and the ends of cycles as TensorBoard event files into DIR",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or print once. Return 1 if there is nothing to print.

    Raises:
        ConfigError: the directory can't be read, the port is taken, or prometheus_client is missing.
    """
    check_installed("megatron-ft exporter")
    host, port = split_address(METRICS_PORT.parse("--port", args.port))
    board = None if args.tensorboard is None else TensorBoardFiles(args.tensorboard)
    shown = _read(args.directory, board)
    if args.once:
        sys.stdout.write(as_text(lambda: shown).decode())
        return 0 if shown else 1
    server = MetricsServer(host, port, lambda: shown)
    took_s = 0.0
    print(f"metrics: http://{host or 'localhost'}:{server.port}/metrics", flush=True)
    try:
        while True:
            time.sleep(max(_READ_S, _SELDOM * took_s))
            began_s = time.monotonic()
            shown = _read(args.directory, board)
            took_s = time.monotonic() - began_s
    except KeyboardInterrupt:
        server.close()
    return 0


def _read(directory: str, board: TensorBoardFiles | None) -> Sequence[Series]:
    """Return the metrics of the newest run in the directory, and add what is new to the TensorBoard files.

    Raises:
        ConfigError: the directory can't be read.
    """
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.logs.runs import runs_in

    runs = runs_in([directory])
    if not runs:
        return ()
    if board is not None:
        board.update(analyze(runs[-1]))
    return _of_run(directory, runs[-1])


def _of_run(directory: str, run: Run) -> Sequence[Series]:
    from megatron_ft.cli.analysis.interval_lengths import timeouts_in_force
    from megatron_ft.cli.logs.runs import life_of
    from megatron_ft.cli.status.job_directory import view

    metrics = JobMetrics()
    for each in run.stream():
        if each.record is not None:
            metrics.hear(each.record, each.host)
    job = view(run, life_of(directory, run), time.time_ns())
    readings = GaugeValues(
        accounting=run.accounting,
        iteration=job.iteration,
        timeouts={name: seconds for name, seconds in timeouts_in_force(run).items() if name != HEARTBEAT},
        nodes={row.name: row.state for row in job.nodes},
    )
    return metrics.series(readings, of_job=True)
