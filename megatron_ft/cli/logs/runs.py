"""Runs of jobs, put together from the event logs of directories; one may hold several runs."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ft.cli.logs.read import EventLogFile, read_directory
from megatron_ft.errors import ConfigError, ProtocolError
from megatron_ft.job.rules.lives import LIVES_FILE, Life, Lives
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.base.hosts import natural
from megatron_ft.link.facts.all_kinds import RECORDS, Record, Timed
from megatron_ft.link.facts.launcher import Abandoned, CycleStarted, Meeting, RunEnded, StopRequested
from megatron_ft.link.files.own_files import read_own
from megatron_ft.records.rules.accounting import Accounting, CycleSummary, Ledger

_SAME_CLOCK_NS = 60_000_000_000  # a wall clock may be set during a run, but not by much
_NO_ID = "none"
"""torchrun's default --rdzv-id."""
_ALONE = "alone"
_WITHIN = "megatron_ft"
"""Subdirectory of the event logs in --log-dir, which is torchrun's."""


@dataclass(kw_only=True, eq=False)
class Run:
    """One run of a job, by the event logs of all its nodes.

    Args:
        files: in the order in which they were opened.
        damaged_minutes: number of minutes that can't be read, known once all are read.
    """

    run_id: str
    files: tuple[EventLogFile, ...]
    damaged_minutes: int = 0

    @property
    def name(self) -> str:
        """The job, for persons."""
        return "job" if self.run_id == _NO_ID else f"job {self.run_id}"

    @property
    def opened_ns(self) -> int:
        """When its first log was opened, nanoseconds since the epoch."""
        return min(log.header.wall_ns for log in self.files)

    @property
    def begin_ns(self) -> int:
        """Start of its first launcher's process, nanoseconds since the epoch; of its first log, if that isn't known."""
        began = (log.header.began_ns + log.wall_offset_ns for log in self.files if log.header.began_ns is not None)
        return min([self.opened_ns, *began])

    @cached_property
    def offsets_ns(self) -> tuple[int, ...]:
        """Offset of nanoseconds since the epoch from the monotonic clock of each of the ``files``.

        One offset serves all logs of a clock, so that times of its processes differ by exactly what it showed. A log
        whose own offset is further than a minute from those known of its host is of another clock: two containers, or
        a host before and after a reboot, may share a name.
        """
        known: dict[str, list[int]] = {}
        found: dict[int, int] = {}
        for log in sorted(self.files, key=lambda log: log.header.role != "launcher"):
            of_host = known.setdefault(log.host, [])
            nearest = min(of_host, key=lambda offset: abs(offset - log.wall_offset_ns), default=None)
            if nearest is None or abs(nearest - log.wall_offset_ns) > _SAME_CLOCK_NS:
                nearest = log.wall_offset_ns
                of_host.append(nearest)
            found[id(log)] = nearest
        return tuple(found[id(log)] for log in self.files)

    @cached_property
    def _read(self) -> list[Timed[Record | Raw | None]]:
        timed = [
            Timed(entry.t + offset_ns, offset_ns, log.host, entry.record)
            for log, offset_ns in zip(self.files, self.offsets_ns, strict=True)
            for entry in log.entries
        ]
        return sorted(timed, key=lambda each: each.at_ns)

    @cached_property
    def records(self) -> tuple[Timed[Record | None], ...]:
        """All records but the minutes, in the order of their wall times."""
        kept = [(each, each.record) for each in self._read if not isinstance(each.record, Raw)]
        return tuple(Timed(each.at_ns, each.offset_ns, each.host, record) for each, record in kept)

    @property
    def end_ns(self) -> int:
        """Time of its last record, nanoseconds since the epoch."""
        return self._read[-1].at_ns if self._read else self.opened_ns

    def stream(self) -> Iterator[Timed[Record | None]]:
        """Yield all records in the order of their wall times, and account for them; keep no minute."""
        ledger = Ledger(self.begin_ns)
        self.damaged_minutes = 0
        for each in self._read:
            try:
                record = RECORDS.read(each.record) if isinstance(each.record, Raw) else each.record
            except ProtocolError:
                self.damaged_minutes += 1
                continue
            event = Timed(each.at_ns, each.offset_ns, each.host, record)
            ledger.take(event)
            yield event
        self.accounting = ledger.accounting(self.end_ns)

    @cached_property
    def accounting(self) -> Accounting:
        for _ in self.stream():
            pass
        return self.accounting

    @property
    def cycles(self) -> Sequence[CycleSummary]:
        return self.accounting.cycles

    @property
    def restarts(self) -> int:
        """Number of restarts of the ranks."""
        return max(0, len(self.cycles) - 1)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted({log.host for log in self.files}, key=natural))

    @property
    def passed_over(self) -> int:
        """Number of lines of its logs that couldn't be read."""
        return sum(log.passed_over for log in self.files) + self.damaged_minutes

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launchers (the largest, if nodes differ); None if it isn't in the logs."""
        codes = (each.record.exit_code for each in self.records if isinstance(each.record, RunEnded))
        return max((code for code in codes if code is not None), default=None)

    @cached_property
    def started(self) -> list[CycleStarted]:
        """Start of each cycle on each node."""
        return [each.record for each in self.records if isinstance(each.record, CycleStarted)]

    @property
    def world_size(self) -> int | None:
        return next((each.world_size for each in reversed(self.started) if each.world_size is not None), None)

    @property
    def max_restarts(self) -> int | None:
        return next((each.max_restarts for each in self.started), None)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the last cycle whose launchers' logs aren't here."""
        last = max((each.cycle for each in self.started), default=-1)
        of_last = [each for each in self.started if each.cycle == last]
        size = max((each.world_size or 0 for each in of_last), default=0)
        here = {rank.rank for each in of_last for rank in each.ranks}
        return tuple(rank for rank in range(size) if rank not in here) if here else ()


def log_directory(given: str) -> str:
    """Return where the event logs are: the directory itself, or if it is a --log-dir, its subdirectory."""
    within = os.path.join(given, _WITHIN)
    return within if os.path.isdir(within) and not glob.glob(f"{glob.escape(given)}/launcher-*.jsonl") else given


def runs_in(directories: Sequence[str]) -> list[Run]:
    """Return the runs with logs in these directories, oldest first. A directory named twice is read once.

    Raises:
        ConfigError: a directory can't be read.
    """
    logs = []
    for directory in dict.fromkeys(os.path.realpath(log_directory(each)) for each in directories):
        try:
            logs += read_directory(directory)
        except OSError as error:
            raise ConfigError(f"{directory} can't be read: {error.strerror}") from None
    return split_runs(logs)


def life_of(directory: str, run: Run) -> Life | None:
    """Return the last life in ``result.json``, unless it had ended before this run began."""
    try:
        lives = Lives.parse(read_own(os.path.join(directory, LIVES_FILE), of_any_user=True)).lives
    except (OSError, ValueError):
        return None  # a run that has just begun
    opened = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.opened_ns / 1e9))
    return lives[-1] if lives and not (lives[-1].ended and lives[-1].ended < opened) else None


def split_runs(files: Sequence[EventLogFile]) -> list[Run]:
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
            runs.append(Run(run_id=run_id, files=tuple(group)))
    return sorted(runs, key=lambda run: run.opened_ns)


def _run_begins(files: Sequence[EventLogFile]) -> list[int]:
    """Return when the runs of one id began: wall ns, oldest first."""
    begins: list[int] = []
    run: list[EventLogFile] = []
    last_ns = 0
    for log in sorted((log for log in files if log.header.role == "launcher"), key=lambda log: log.header.wall_ns):
        if not run or (log.header.wall_ns > last_ns and not _goes_on(run, log)):
            begins.append(log.header.wall_ns)
            run, last_ns = [], 0
        run.append(log)
        last_ns = max(last_ns, log.newest + log.wall_offset_ns)
    return begins


def _goes_on(run: Sequence[EventLogFile], log: EventLogFile) -> bool:
    """Return True if a run of which nothing newer is recorded hasn't ended when a launcher starts that takes part.

    A launcher whose ranks train may write nothing for hours, and a killed one never records its end: the launchers
    after it show which of the two it is.
    """
    meeting = _meeting(log)
    others = [each for each in run if meeting.rank is None or _meeting(each).rank != meeting.rank]
    if meeting.how == _ALONE or all([*_told(each, RunEnded)] for each in others):
        return False
    begun = [pair for each in run for pair in _told(each, CycleStarted)]
    own = [record.cycle for _, record in _told(log, CycleStarted)]
    if own:  # each run counts cycles from 0
        return bool(min(own) > max((record.cycle for _, record in begun), default=0))
    # a launcher that isn't asked to leave stays until the end of the job: the silent ones were killed
    begun_ns = max((at_ns for at_ns, _ in begun), default=0)
    stayed = [each for each in run if not [*_told(each, StopRequested | Abandoned)]]
    return all(at_ns <= begun_ns for each in stayed for at_ns, _ in _told(each, RunEnded))


def _meeting(log: EventLogFile) -> Meeting:
    return next((record for _, record in _told(log, Meeting)), Meeting())


def _told(log: EventLogFile, kind: Any) -> Iterator[tuple[int, Any]]:
    """Yield the records of a kind, each with its time, wall ns."""
    return ((entry.t + log.wall_offset_ns, entry.record) for entry in log.entries if isinstance(entry.record, kind))
