"""Read the event logs of a directory; they may still be written to, cut off, or come from several nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["EventLogFile", "Record", "parse_log", "read_directory"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One event of one process.

    Args:
        t: nanoseconds of that host's CLOCK_MONOTONIC; comparable within a host, not between hosts.
        ev: the event's name.
        fields: what else was written with it.
    """

    t: int
    ev: str
    host: str
    role: str
    pid: int
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def get(self, name: str) -> Any:
        """A field, None if the record has no such field."""
        return self.fields.get(name)


@dataclass(frozen=True, kw_only=True)
class EventLogFile:
    """What one process wrote.

    Args:
        header: the fields of its first record: schema, role, host, pid, run_id, wall_ns and more.
        opened: nanoseconds of CLOCK_MONOTONIC when it was opened; ``header["wall_ns"]`` is the same moment.
        passed_over: lines that couldn't be read: cut off by a crash, torn by a full disk, or not ours.
    """

    name: str
    header: Mapping[str, Any]
    opened: int
    records: tuple[Record, ...]
    passed_over: int

    @property
    def host(self) -> str:
        """The node's name."""
        return str(self.header.get("host", ""))

    @property
    def wall_offset_ns(self) -> int:
        """What to add to this host's monotonic clock to get nanoseconds since the epoch."""
        return int(self.header["wall_ns"]) - self.opened


def read_directory(directory: str | Path) -> list[EventLogFile]:
    """All event logs directly in ``directory``, in the order in which they were opened.

    Files that aren't event logs are left out, and so are those that can't be read any more.

    Raises:
        OSError: the directory itself can't be read.
    """
    files = []
    for path in sorted(Path(directory).iterdir()):
        if path.suffix != ".jsonl":
            continue
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # removed since, or somebody else's: the other logs still tell most of it
        log = parse_log(path.name, text.splitlines())
        if log is not None:
            files.append(log)
    return sorted(files, key=lambda log: (log.header["wall_ns"], log.name))


def parse_log(name: str, lines: Iterable[str]) -> EventLogFile | None:
    """One event log from its lines; None if it doesn't begin with a header that we know."""
    documents, passed_over = _parse_lines(lines)
    if not documents or documents[0].get("ev") != "log_opened":
        return None
    header = documents[0]
    if not all(_is_whole(header.get(key)) for key in ("t", "wall_ns", "pid")):
        return None
    origin = {"host": str(header.get("host", "")), "role": str(header.get("role", "")), "pid": header["pid"]}
    return EventLogFile(
        name=name,
        header=MappingProxyType(header),
        opened=header["t"],
        records=tuple(
            Record(t=document["t"], ev=document["ev"], fields=MappingProxyType(document), **origin)
            for document in documents[1:]
        ),
        passed_over=passed_over,
    )


def _parse_lines(lines: Iterable[str]) -> tuple[Sequence[dict[str, Any]], int]:
    documents: list[dict[str, Any]] = []
    passed_over = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError:
            passed_over += 1
            continue
        if isinstance(document, dict) and _is_whole(document.get("t")) and isinstance(document.get("ev"), str):
            documents.append(document)
        else:
            passed_over += 1
    return documents, passed_over


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
