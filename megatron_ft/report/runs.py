"""Which event logs belong to the same run: a log directory may hold those of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.report.read import EventLogFile, Record

__all__ = ["RunLogs", "split_runs"]


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

    def wall_offsets_ns(self) -> dict[str, int]:
        """For each host, what to add to its monotonic clock to get nanoseconds since the epoch.

        One offset serves each host, so that times of its processes differ by exactly what its clock showed.
        """
        offsets: dict[str, int] = {}
        for log in sorted(self.files, key=lambda log: log.header.get("role") != "launcher"):
            offsets.setdefault(log.host, log.wall_offset_ns)
        return offsets

    def records(self) -> list[tuple[int, Record]]:
        """All records with their wall time (ns since the epoch), in that order."""
        offsets = self.wall_offsets_ns()
        timed = [(record.t + offsets[log.host], record) for log in self.files for record in log.records]
        return sorted(timed, key=lambda pair: pair[0])


def split_runs(files: Sequence[EventLogFile]) -> list[RunLogs]:
    """The runs in these logs, oldest first.

    Logs of different run ids are of different runs. A run id may come again, in a directory that is used again;
    a new run begins with a launcher that starts after all earlier launchers have written their last.
    """
    runs = []
    for run_id in sorted({str(log.header.get("run_id", "")) for log in files}):
        mine = [log for log in files if str(log.header.get("run_id", "")) == run_id]
        begins = _begins([log for log in mine if log.header.get("role") == "launcher"])
        groups: dict[int, list[EventLogFile]] = {}
        for log in mine:
            begun = [begin for begin in begins if begin <= log.header["wall_ns"]]
            groups.setdefault(begun[-1] if begun else 0, []).append(log)
        for group in groups.values():
            opened = min(log.header["wall_ns"] for log in group)
            runs.append(RunLogs(run_id=run_id, opened_wall_ns=opened, files=tuple(group)))
    return sorted(runs, key=lambda run: run.opened_wall_ns)


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
