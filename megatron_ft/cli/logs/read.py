"""Reader of the event logs of a directory; they may still be written to, cut off, or come from several nodes."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core.codec import Message, Moment, Raw, decode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.facts.all_kinds import RECORDS, Record
from megatron_ft.core.facts.shared import LogOpened

_MUCH = 50_000_000  # bytes; fewer are read before other processes have started


class _LineHead(Message, frozen=True):
    t: Moment
    ev: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a log.

    Args:
        t: nanoseconds of that host's CLOCK_MONOTONIC; comparable within a host, not between hosts.
        record: None for an unknown kind, or an unusable record.
    """

    t: int
    record: Record | None


@dataclass(frozen=True, kw_only=True)
class EventLogFile:
    """Log of one process.

    Args:
        header: its first record.
        opened: nanoseconds of CLOCK_MONOTONIC when it was opened; ``header.wall_ns`` is the same moment.
        entries: all records.
        passed_over: number of lines not read, or not completely: cut off by a crash, torn by a full disk, or foreign.
    """

    name: str
    header: LogOpened
    opened: int
    entries: tuple[Entry, ...]
    passed_over: int

    @property
    def host(self) -> str:
        """Name of the node."""
        return self.header.host

    @property
    def wall_offset_ns(self) -> int:
        """Difference between nanoseconds since the epoch and this host's monotonic clock, as this process saw it."""
        return self.header.wall_ns - self.opened

    @property
    def newest(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC of its last record."""
        return max([self.opened, *(entry.t for entry in self.entries)])


def read_directory(
    directory: str | Path, *, processes: int = 1, advance: Callable[[int], None] = lambda _files: None
) -> list[EventLogFile]:
    """Return all event logs directly in ``directory``, in the order in which they were opened.

    Files that aren't event logs, or can't be read any more, are left out.

    Args:
        processes: number of parallel readers, if there is much to read; they import the caller's ``__main__``.
        advance: called with the number of files that were read since.

    Raises:
        OSError: the directory itself can't be read.
    """
    paths = _paths(directory)
    processes = min(processes, len(paths))
    if processes > 1 and _bytes_in(paths) >= _MUCH:
        # fresh interpreters: numpy has threads, which a forked process would lack
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            return _as_opened(_counted(pool.map(_read_file, paths), advance))
    return _as_opened(_counted(map(_read_file, paths), advance))


def _counted(logs: Iterable[EventLogFile | None], advance: Callable[[int], None]) -> Iterator[EventLogFile | None]:
    for log in logs:
        advance(1)
        yield log


def number_of_logs(directory: str | Path) -> int:
    """Return the number of event logs directly in ``directory``.

    Raises:
        OSError: the directory can't be read.
    """
    return len(_paths(directory))


def _as_opened(logs: Iterable[EventLogFile | None]) -> list[EventLogFile]:
    """Return the readable logs in the order in which they were opened."""
    return sorted((log for log in logs if log is not None), key=lambda log: (log.header.wall_ns, log.name))


def _paths(directory: str | Path) -> list[Path]:
    """Return the paths of event logs; only of files, because opening a FIFO would wait for a writer."""
    return [path for path in sorted(Path(directory).iterdir()) if path.suffix == ".jsonl" and path.is_file()]


def _bytes_in(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _read_file(path: Path) -> EventLogFile | None:
    try:
        # line by line: the log of a long run has hundreds of megabytes
        with path.open("rb") as file:
            return parse_log(path.name, file)
    except OSError:
        return None  # removed since, or another user's: the other logs still hold most of it


def parse_log(name: str, lines: Iterable[bytes]) -> EventLogFile | None:
    """Parse one event log; None if it doesn't begin with a known header."""
    lines = iter(lines)
    passed_over, doubts = 0, list[str]()
    for line in lines:
        first = _head(line)
        if first is not None:
            break
        passed_over += bool(line.strip())
    else:
        return None
    header = RECORDS.salvage(Raw(first.ev, line), doubts)
    if not isinstance(header, LogOpened):
        return None
    passed_over += bool(doubts)
    entries = []
    for line in lines:
        head = _head(line)
        if head is None:
            passed_over += bool(line.strip())
            continue
        doubts = []
        entries.append(Entry(head.t, RECORDS.salvage(Raw(head.ev, line), doubts)))
        passed_over += bool(doubts)
    return EventLogFile(name=name, header=header, opened=first.t, entries=tuple(entries), passed_over=passed_over)


def _head(line: bytes) -> _LineHead | None:
    """Return time and name of a record; None if the line is none."""
    try:
        return decode(_LineHead, line)
    except ProtocolError:
        return None
