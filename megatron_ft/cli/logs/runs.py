"""Which event logs belong to the same run: a log directory may hold those of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ft.cli.logs.read import EventLogFile, Record

__all__ = ["Clock", "RunLogs", "TimedRecord", "split_runs"]

_SAME_CLOCK_NS = 60_000_000_000  # a wall clock may be set while a run goes on, but not by much

TimedRecord = tuple[int, Record]
"""Wall time in ns since the epoch, and a record."""


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
        launchers_first = sorted(enumerate(self.files), key=lambda pair: pair[1].header.get("role") != "launcher")
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
    def records(self) -> tuple[TimedRecord, ...]:
        """All records with their wall time (ns since the epoch), in that order."""
        logs = zip(self.files, self.clocks, strict=True)
        timed = [(record.t + clock.offset_ns, record) for log, clock in logs for record in log.records]
        return tuple(sorted(timed, key=lambda pair: pair[0]))


def split_runs(files: Sequence[EventLogFile]) -> list[RunLogs]:
    """The runs in these logs, oldest first.

    Logs of different run ids are of different runs. A run id may come again, in a directory that is used again;
    a new run begins with a launcher that starts after all earlier launchers have written their last.
    """
    runs = []
    for run_id in sorted({_run_id(log) for log in files}):
        mine = [log for log in files if _run_id(log) == run_id]
        begins = _begins([log for log in mine if log.header.get("role") == "launcher"])
        groups: dict[int, list[EventLogFile]] = {}
        for log in mine:
            begun = [begin for begin in begins if begin <= log.header["wall_ns"]]
            groups.setdefault(begun[-1] if begun else 0, []).append(log)
        for group in groups.values():
            opened = min(log.header["wall_ns"] for log in group)
            runs.append(RunLogs(run_id=run_id, opened_wall_ns=opened, files=tuple(group)))
    return sorted(runs, key=lambda run: run.opened_wall_ns)


def _run_id(log: EventLogFile) -> str:
    return log.header.get("run_id") or ""


def _begins(launchers: Sequence[EventLogFile]) -> list[int]:
    """When runs began, wall ns: launchers whose lives overlap are of the same run."""
    begins: list[int] = []
    busy_until = -1
    for log in sorted(launchers, key=lambda log: log.header["wall_ns"]):
        opened = log.header["wall_ns"]
        if opened > busy_until:
            begins.append(opened)
        last = max((record.t for record in log.records), default=log.opened)
        busy_until = max(busy_until, last + log.wall_offset_ns)
    return begins
