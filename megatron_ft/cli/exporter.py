"""`megatron-ft exporter`: goodput, step times and restarts of a job as TensorBoard event files, from its event logs."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from megatron_ft.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ft.cli.analysis.analysis import Analysis

_READ_S, _SELDOM = 15.0, 4.0
"""Least seconds between two readings, and the same as a multiple of what the last one took."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "exporter",
        help="goodput and step times of a job as TensorBoard event files",
        description="Writes what is new in the newest run in LOG_DIR, every 15 seconds. docs/telemetry.md says what.",
    )
    parser.add_argument("directory", metavar="LOG_DIR", help="directory that ft_launcher names as 'logs:'")
    parser.add_argument("--tensorboard", metavar="DIR", help="directory for the event files; needed")
    parser.add_argument("--once", action="store_true", help="write what is there and exit")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Write until Ctrl-C, or once. Return 1 if there is nothing to write.

    Raises:
        ConfigError: the directory can't be read, or tensorboard is missing.
    """
    if args.tensorboard is None:
        raise ConfigError("--tensorboard DIR is missing; for Prometheus: --ft-metrics-port of ft_launcher")
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise ConfigError("--tensorboard needs tensorboard: pip install 'megatron-ft[tensorboard]'") from None
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.logs.runs import runs_in

    runs = runs_in([args.directory])
    writer, opened_ns, written = EventFileWriter(args.tensorboard), 0, (-1.0, 0)
    try:
        while True:
            began_s = time.monotonic()
            if runs:
                written = written if runs[-1].opened_ns == opened_ns else (-1.0, 0)
                opened_ns, written = runs[-1].opened_ns, _write(writer, analyze(runs[-1]), *written)
            writer.flush()
            if args.once:
                return 0 if runs else 1
            time.sleep(max(_READ_S, _SELDOM * (time.monotonic() - began_s)))
            runs = runs_in([args.directory])
    except KeyboardInterrupt:
        return 0
    finally:
        writer.close()


def _write(writer: Any, analysis: Analysis, upto_s: float, cycles: int) -> tuple[float, int]:
    """Write the goodput of now, the step times after ``upto_s`` seconds, and the ends of cycles after the first ones.

    Steps are iterations. Return the moment and the number of cycles up to which all is written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.scalar.summary import scalar_pb
    from tensorboard.plugins.text.summary import text_pb

    from megatron_ft.cli.analysis.steps import step_times

    timeline, accounting = analysis.timeline, analysis.run.accounting
    begin_s, end_s = timeline.begin_ns / 1e9, timeline.end_ns / 1e9
    iteration = max((each.last_iteration or 0 for each in accounting.cycles), default=0)

    def add(summary: Any, step: int, wall_s: float) -> None:
        writer.add_event(Event(wall_time=wall_s, step=step, summary=summary))

    if accounting.goodput is not None:
        add(scalar_pb("megatron_ft/goodput", accounting.goodput.share), iteration, end_s)
        for of, seconds in accounting.goodput.seconds.items():
            add(scalar_pb(f"megatron_ft/seconds/{of.value}", seconds), iteration, end_s)
    points = [each for each in step_times(timeline)[:-1] if each.at_s > upto_s]  # the last one may still change
    for point in points:
        for name, seconds in (("median", point.median_s), ("slowest_rank", point.slowest_s)):
            add(scalar_pb(f"megatron_ft/step_s/{name}", seconds), point.iteration, begin_s + point.at_s)
    ended = [each for each in accounting.cycles if each.end_ns is not None]
    for cycle in ended[cycles:]:
        text = cycle.outcome if cycle.cause is None else cycle.cause.line
        told = f"cycle {cycle.cycle} ended: {text}"
        add(text_pb("megatron_ft/cycles", told), cycle.last_iteration or 0, (cycle.end_ns or 0) / 1e9)
    return (points[-1].at_s if points else upto_s), len(ended)
