"""Which event logs belong to the same run: a log directory may hold those of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from megatron_ft.cli.logs.begins import run_begins
from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.core.records.all_kinds import Record

__all__ = ["Clock", "RunLogs", "Timed", "split_runs"]

_SAME_CLOCK_NS = 60_000_000_000  # a wall clock may be set while a run goes on, but not by much

_R = TypeVar("_R", bound=Record | None, covariant=True)


@dataclass(frozen=True, slots=True)
class Timed(Generic[_R]):
    """A record in wall time.

    Args:
        at_ns: when it was written, ns since the epoch.
        offset_ns: what to add to its own moments to get such times.
        record: None where it is of a kind that we don't know, or can't be used.
    """

    at_ns: int
    offset_ns: int
    host: str
    record: _R

    def wall_ns(self, moment_ns: int) -> int:
        """One of its own moments."""
        return moment_ns + self.offset_ns


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A monotonic clock: of a host, since it was started. Two containers, or a host before and after a reboot, may
    have the same name.

    Args:
        offset_ns: what to add to it to get nanoseconds since the epoch.
    """

    host: str
    offset_ns: int


@dataclass(frozen=True, kw_only=True)
class RunLogs:
    """The event logs of one run, on all its nodes.

    Args:
        opened_wall_ns: when its first log was opened, nanoseconds since the epoch.
        files: in the order in which they were opened.
    """

    run_id: str
    opened_wall_ns: int
    files: tuple[EventLogFile, ...]

    @cached_property
    def clocks(self) -> tuple[Clock, ...]:
        """The clock of each of the ``files``.

        One offset serves all logs of a clock, so that times of its processes differ by exactly what it showed. A log
        whose own offset is further than a minute from those of its host's known clocks is of another clock.
        """
        known: dict[str, list[Clock]] = {}
        found: dict[int, Clock] = {}
        launchers_first = sorted(enumerate(self.files), key=lambda pair: pair[1].header.role != "launcher")
        for index, log in launchers_first:
            of_host = known.setdefault(log.host, [])
            mine = Clock(host=log.host, offset_ns=log.wall_offset_ns)
            nearest = min(of_host, key=lambda clock: abs(clock.offset_ns - mine.offset_ns), default=None)
            if nearest is None or abs(nearest.offset_ns - mine.offset_ns) > _SAME_CLOCK_NS:
                of_host.append(mine)
                nearest = mine
            found[index] = nearest
        return tuple(found[index] for index in range(len(self.files)))

    @cached_property
    def records(self) -> tuple[Timed[Record | None], ...]:
        """All records in the order of their wall times."""
        timed = [
            Timed(entry.t + clock.offset_ns, clock.offset_ns, log.host, entry.record)
            for log, clock in zip(self.files, self.clocks, strict=True)
            for entry in log.entries
        ]
        return tuple(sorted(timed, key=lambda each: each.at_ns))


def split_runs(files: Sequence[EventLogFile]) -> list[RunLogs]:
    """The runs in these logs, oldest first.

    Logs of different run ids are of different runs. A run id may come again, in a directory that is used again;
    a new run begins with a launcher that starts after the earlier ones have ended, see `run_begins`.
    """
    runs = []
    for run_id in sorted({log.header.run_id for log in files}):
        mine = [log for log in files if log.header.run_id == run_id]
        begins = run_begins(mine)
        groups: dict[int, list[EventLogFile]] = {}
        for log in mine:
            begun = [begin for begin in begins if begin <= log.header.wall_ns]
            groups.setdefault(begun[-1] if begun else 0, []).append(log)
        for group in groups.values():
            opened = min(log.header.wall_ns for log in group)
            runs.append(RunLogs(run_id=run_id, opened_wall_ns=opened, files=tuple(group)))
    return sorted(runs, key=lambda run: run.opened_wall_ns)
