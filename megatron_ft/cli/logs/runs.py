"""Assignment of event logs to runs: a log directory may hold several runs."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from megatron_ft.cli.logs.read import EventLogFile, number_of_logs, read_directory
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.launcher import Abandoned, CycleStarted, Meeting, RunEnded, StopRequested
from megatron_ft.core.facts.monitor import Minute
from megatron_ft.core.facts.timed import Timed

_MOST_PROCESSES = 8
_SAME_CLOCK_NS = 60_000_000_000  # a wall clock may be set during a run, but not by much
_QUIET_NS = 86_400_000_000_000
_QUIET_WITH_HOOKS_NS = 3_600_000_000_000
"""Age of its last record at which a run counts as over. Ranks that call hooks are recorded every minute, unless
their board can't be read."""
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
_ALONE = "alone"
_WITHIN = "megatron_ft"
"""Subdirectory of the event logs in --log-dir, which is torchrun's."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A monotonic clock of a host, since its boot. Two containers, or a host before and after a reboot, may share a
    name.

    Args:
        offset_ns: offset of nanoseconds since the epoch from this clock.
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

    @property
    def begin_ns(self) -> int:
        """Start of its first launcher's process, nanoseconds since the epoch; of its first log, if that isn't known."""
        began = (log.header.began_ns + log.wall_offset_ns for log in self.files if log.header.began_ns is not None)
        return min([self.opened_wall_ns, *began])

    @cached_property
    def clocks(self) -> tuple[Clock, ...]:
        """Clock of each of the ``files``.

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


def log_directory(given: str) -> str:
    """Return where the event logs are: the directory itself, or if it is a --log-dir, its subdirectory."""
    within = os.path.join(given, _WITHIN)
    return within if os.path.isdir(within) and not glob.glob(f"{glob.escape(given)}/launcher-*.jsonl") else given


def runs_in(directories: Sequence[str], progress_bar: ProgressBar) -> list[RunLogs]:
    """Return the runs with logs in these directories, oldest first; print a line on stderr if there are none.

    A directory named twice is read once. ``progress_bar``: as in `terminal`.

    Raises:
        ConfigError: a directory can't be read.
    """
    logs = []
    for directory in dict.fromkeys(map(os.path.realpath, directories)):
        try:
            processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
            with progress_bar(f"reading {directory}", number_of_logs(directory)) as advance:
                logs += read_directory(directory, processes=processes, advance=advance)
        except OSError as error:
            raise ConfigError(f"{directory} can't be read: {error.strerror}") from None
    runs = split_runs(logs)
    if not runs:
        where = "give the directory that ft_launcher names as 'logs:'"
        print(f"megatron-ft: no event logs in {', '.join(directories)}; {where}", file=sys.stderr)
    return runs


def split_runs(files: Sequence[EventLogFile]) -> list[RunLogs]:
    """Return the runs in these logs, oldest first.

    Logs of different run ids are of different runs. A run id may recur in a directory that is used again; a new run
    begins with a launcher that starts after the earlier ones have ended, see `_run_begins`.
    """
    runs = []
    for run_id in sorted({log.header.run_id for log in files}):
        mine = [log for log in files if log.header.run_id == run_id]
        begins = _run_begins(mine)
        groups: dict[int, list[EventLogFile]] = {}
        for log in mine:
            begun = [begin for begin in begins if begin <= log.header.wall_ns]
            groups.setdefault(begun[-1] if begun else 0, []).append(log)
        for group in groups.values():
            opened = min(log.header.wall_ns for log in group)
            runs.append(RunLogs(run_id=run_id, opened_wall_ns=opened, files=tuple(group)))
    return sorted(runs, key=lambda run: run.opened_wall_ns)


def _run_begins(files: Sequence[EventLogFile]) -> list[int]:
    """Return when the runs of one id began: wall ns, oldest first.

    A later launcher belongs to a run that goes on, or begins another. A launcher whose ranks train writes nothing for
    minutes, or hours if these call no hooks; a killed one never records its end. The launchers after it show which of
    the two it is.
    """
    begins: list[int] = []
    run: list[_Launcher] = []
    for log in sorted((log for log in files if log.header.role == "launcher"), key=lambda log: log.header.wall_ns):
        launcher = _Launcher(log)
        if not run or not _goes_on(run, launcher):
            begins.append(launcher.opened_ns)
            run = []
        run.append(launcher)
    return begins


class _Launcher:
    """Facts of a launcher's log; wall ns."""

    def __init__(self, log: EventLogFile) -> None:
        self.opened_ns = log.header.wall_ns
        self.last_ns = log.newest + log.wall_offset_ns
        self.ended_ns: int | None = None
        self.was_asked = False
        """True if it was asked to leave the job, which may go on without it."""
        self.has_minutes = False
        """True if its ranks call hooks."""
        self.meeting = Meeting()
        self.cycles: list[tuple[int, int]] = []
        """Cycles it took part in, and when each began."""
        for entry in log.entries:
            at_ns = entry.t + log.wall_offset_ns
            match entry.record:
                case CycleStarted(cycle=cycle):
                    self.cycles.append((cycle, at_ns))
                case Minute():
                    self.has_minutes = True
                case Meeting() as meeting:
                    self.meeting = meeting
                case StopRequested() | Abandoned():
                    self.was_asked = True
                case RunEnded():
                    self.ended_ns = at_ns


def _goes_on(run: Sequence[_Launcher], launcher: _Launcher) -> bool:
    """Return True if the run hasn't ended when the launcher starts, which then takes part in it."""
    if launcher.opened_ns <= max(each.last_ns for each in run):
        return True
    rank = launcher.meeting.rank
    open_ = [each for each in run if each.ended_ns is None and (rank is None or each.meeting.rank != rank)]
    if not open_ or launcher.meeting.how == _ALONE:
        return False
    if launcher.cycles:  # each run counts cycles from 0
        return min(launcher.cycles)[0] > max((cycle for each in run for cycle, _ in each.cycles), default=0)
    begun_ns = max((at_ns for each in run for _, at_ns in each.cycles), default=0)
    if any(each.ended_ns is not None and each.ended_ns > begun_ns and not each.was_asked for each in run):
        return False  # a launcher that isn't asked to leave stays until the end of the job: the silent ones were killed
    newest_ns = max(each.last_ns for each in run)
    call_hooks = any(each.has_minutes for each in run)
    return launcher.opened_ns - newest_ns < (_QUIET_WITH_HOOKS_NS if call_hooks else _QUIET_NS)
