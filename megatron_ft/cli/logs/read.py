"""Reader of the event logs of a directory; they may still be written to, cut off, or come from several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Message, Moment, Raw, decode, name_of
from megatron_ft.link.facts.all_kinds import RECORDS, Record
from megatron_ft.link.facts.launcher import HangReported
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.link.facts.shared import LogOpened

MINUTE = name_of(Minute)


class _LineHead(Message, frozen=True):
    t: Moment
    ev: str


class Entry(NamedTuple):
    """One line of a log.

    Args:
        t: nanoseconds of that host's CLOCK_MONOTONIC; comparable within a host, not between hosts.
        record: None for an unknown kind. A minute isn't decoded yet: decoded it takes ten times the room.
    """

    t: int
    record: Record | Raw | None


@dataclass(frozen=True, kw_only=True)
class EventLogFile:
    """Log of one process.

    Args:
        header: its first record.
        opened: nanoseconds of CLOCK_MONOTONIC when it was opened; ``header.wall_ns`` is the same moment.
        entries: all records.
        passed_over: number of lines not read: cut off by a crash, torn by a full disk, or foreign.
    """

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


def read_directory(directory: str | Path) -> list[EventLogFile]:
    """Return all event logs directly in ``directory``, in the order in which they were opened.

    Files that aren't event logs, or can't be read any more, are left out.

    Raises:
        OSError: the directory itself can't be read.
    """
    # only files: opening a FIFO would wait for a writer
    paths = [path for path in sorted(Path(directory).iterdir()) if path.suffix == ".jsonl" and path.is_file()]
    logs = [log for path in paths if (log := _read_file(path)) is not None]
    return sorted(logs, key=lambda log: log.header.wall_ns)


def _read_file(path: Path) -> EventLogFile | None:
    try:
        # line by line: the log of a long run has hundreds of megabytes
        with path.open("rb") as file:
            return parse_log(file)
    except OSError:
        return None  # removed since, or another user's: the other logs still hold most of it


def parse_log(lines: Iterable[bytes]) -> EventLogFile | None:
    """Parse one event log; None if it doesn't begin with a known header."""
    passed_over = 0
    entries: list[Entry] = []
    for line in lines:
        try:
            head = decode(_LineHead, line)
            raw = Raw(head.ev, line)
            if head.ev == "no_collective":  # of version 0.1.0
                raw = Raw(name_of(HangReported), line.replace(b"{", b'{"section":"collectives",', 1))
            entries.append(Entry(head.t, raw if head.ev == MINUTE else RECORDS.read(raw)))
        except ProtocolError:
            passed_over += bool(line.strip())
            continue
        if not isinstance(entries[0].record, LogOpened):
            return None
    if not entries or not isinstance(entries[0].record, LogOpened):
        return None
    opened, *others = entries
    return EventLogFile(header=entries[0].record, opened=opened.t, entries=tuple(others), passed_over=passed_over)
