"""Goodput, step times and restarts of a job as TensorBoard event files; needs the package's extra `tensorboard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ft.cli.base.terminal import check_extra

if TYPE_CHECKING:
    from megatron_ft.cli.analysis.analysis import Analysis


class TensorBoardFiles:
    """Writes what is new in each analysis of a job that goes on. Steps are iterations."""

    def __init__(self, directory: str) -> None:
        """Create the event file.

        Raises:
            ConfigError: the package isn't installed.
        """
        check_extra("tensorboard", "--tensorboard", extra="tensorboard")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(directory)
        self._written_s = -1.0
        self._cycles = 0

    def update(self, analysis: Analysis) -> None:
        """Write the goodput of now, and the step times and ends of cycles since the last call."""
        from tensorboard.plugins.scalar.summary import scalar_pb
        from tensorboard.plugins.text.summary import text_pb

        from megatron_ft.cli.analysis.steps import step_times

        timeline, accounting = analysis.timeline, analysis.run.accounting
        begin_s, end_s = timeline.begin_ns / 1e9, timeline.end_ns / 1e9
        iteration = max((each.last_iteration or 0 for each in accounting.cycles), default=0)
        if accounting.goodput is not None:
            self._add(scalar_pb("megatron_ft/goodput", accounting.goodput.share), iteration, end_s)
            for of, seconds in accounting.goodput.seconds.items():
                self._add(scalar_pb(f"megatron_ft/seconds/{of.value}", seconds), iteration, end_s)
        for point in step_times(timeline)[:-1]:  # the last one may still change
            if point.at_s > self._written_s:
                self._written_s = point.at_s
                for name, seconds in (("median", point.median_s), ("slowest_rank", point.slowest_s)):
                    self._add(scalar_pb(f"megatron_ft/step_s/{name}", seconds), point.iteration, begin_s + point.at_s)
        ended = [each for each in accounting.cycles if each.end_ns is not None]
        for cycle in ended[self._cycles :]:
            text = cycle.outcome if cycle.cause is None else cycle.cause.line
            told = f"cycle {cycle.cycle} ended: {text}"
            self._add(text_pb("megatron_ft/cycles", told), cycle.last_iteration or 0, (cycle.end_ns or 0) / 1e9)
        self._cycles = len(ended)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int, wall_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=wall_s, step=step, summary=summary))
