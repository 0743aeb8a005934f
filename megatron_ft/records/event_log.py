"""Event log of one process: one JSON object per line, in a directory that stays after the run.

Every record is one of ``link.facts``, with ``t``, nanoseconds of CLOCK_MONOTONIC, and ``ev``, its name. The first
one, ``log_opened``, names the writer and ties that clock to the wall clock, so that logs of several nodes can be
merged.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ft.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.link.base.codec import encode_as, name_of
from megatron_ft.link.facts import SCHEMA, shared
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor
from megatron_ft.link.standard_error import put

if TYPE_CHECKING:
    from megatron_ft.link.facts.all_kinds import Record  # at run time each process imports its own

SUFFIX = ".jsonl"
OLDER_SUFFIX = ".before.jsonl"  # sorted before the newer one
FLUSH_S = 2.0
"""Seconds the end of a process may wait for its log."""
_TELL_AFTER_S = 10.0


class EventLog:
    """Appends records, each with one ``write`` of a whole line, in a thread: no caller waits for a disk.

    A full or stuck disk loses records, which is reported; in the file, a record ``records_lost`` counts the missing
    ones. A file that has become too large is replaced by a new one with the same header; one older file is kept.
    """

    def __init__(self, path: str, max_bytes: int = 0) -> None:
        self.path = path
        self._followers: list[Callable[[Record, int], None]] = []
        self._files = FileQueue()
        self._is_closed = False
        self._lost = 0
        self._told: set[str] = set()
        # used by the thread only
        self._file = KeptDescriptor(-1)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._header = b""

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        role: str,
        run_id: str,
        name: str = "",
        max_bytes: int = DEFAULT_LOG_MAX_BYTES,
        local_rank: int | None = None,
        rank: int | None = None,
        cycle: int | None = None,
        began_ns: int | None = None,
    ) -> EventLog:
        """Create a log for this process in ``directory``; ``name`` distinguishes logs of the same role.

        ``max_bytes`` limits what this process keeps in all, the oldest goes first; 0 is no limit.
        """
        host, pid = socket.gethostname(), os.getpid()
        wall_ns, now_ns = time.time_ns(), time.monotonic_ns()
        parts = [role, host, *([name] if name else []), str(pid), str(wall_ns)]
        log = cls(os.path.join(directory, "-".join(parts) + SUFFIX), max_bytes)
        header = shared.LogOpened(
            wall_ns=wall_ns,
            pid=pid,
            schema=SCHEMA,
            role=role,
            host=host,
            run_id=run_id,
            local_rank=local_rank,
            rank=rank,
            cycle=cycle,
            began_ns=began_ns,
        )
        log._header = record_line(now_ns, header)
        log._append(b"")
        atexit.register(log.close)
        return log

    def write(self, record: Record, *, t: int | None = None) -> None:
        """Append one record; ``t`` is its time (monotonic ns) if that isn't now."""
        now_ns = time.monotonic_ns()
        for hear in self._followers:
            hear(record, now_ns if t is None else t)
        if self._is_closed:
            return
        line = record_line(now_ns if t is None else t, record)
        if self._lost:
            line = record_line(now_ns, shared.RecordsLost(count=self._lost)) + line
        if self._append(line):
            self._lost = 0
        else:
            self._lost += 1
            self._tell("full", "loses records: too many wait for its directory to answer")
        if self._files.stands_for_s() > _TELL_AFTER_S:
            self._tell("silent", f"can't be written: its directory hasn't answered for {_TELL_AFTER_S:g} s")

    def follow(self, hear: Callable[[Record, int], None]) -> None:
        """Have ``hear`` called with each record and its time (monotonic ns), also if no file is written."""
        self._followers.append(hear)

    def do(self, job: Callable[[], object]) -> None:
        """Run a job in the log's thread, after the writes so far."""
        if not self._is_closed:
            self._files.do(job)

    def flush(self, bound_s: float = FLUSH_S) -> bool:
        """Wait up to ``bound_s`` seconds until all is written. Return True if it is."""
        return self._files.wait(bound_s)

    def close(self, bound_s: float = FLUSH_S) -> None:
        """Close the log; what isn't written within ``bound_s`` seconds is lost. Idempotent."""
        if self._is_closed:
            return
        until_s = time.monotonic() + bound_s
        self._files.wait(bound_s)  # before closing: a job in progress may write a record, too
        self._is_closed = True
        atexit.unregister(self.close)
        self._files.do(lambda: self._file.close())  # the one that is open by then
        if not self._files.finish(max(0.0, until_s - time.monotonic())):
            self._tell("unwritten", "lost its last records: its directory doesn't answer")

    def _append(self, lines: bytes) -> bool:
        return self._files.do(functools.partial(self._write, lines), len(lines))

    def _tell(self, kind: str, text: str) -> None:
        """Print each kind of complaint once."""
        if kind not in self._told:
            self._told.add(kind)
            put(f"megatron_ft: event log {self.path} {text}")

    def _write(self, lines: bytes) -> None:
        try:
            if self._file.number < 0:
                self._file = KeptDescriptor(self._new_file())
                self._bytes = len(self._header)
            elif not self._file.is_ours:  # a script has closed all descriptors of its process
                self._file = KeptDescriptor(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
            written = os.write(self._file.number, lines) if lines else 0
            if written < len(lines):
                # a torn line would hide the next one too: end it, readers skip it
                os.write(self._file.number, b"\n")
                raise OSError("disk full")
            self._bytes += written
            if 0 < self._max_bytes < 2 * self._bytes:
                self._begin_anew()
        except OSError as error:
            self._tell("error", f"lost records: {error}")

    def _begin_anew(self) -> None:
        """Go on in a new file; there are at most two."""
        self._bytes = len(self._header)
        os.replace(self.path, self.path.removesuffix(SUFFIX) + OLDER_SUFFIX)
        old, self._file = self._file, KeptDescriptor(self._new_file())
        old.close()

    def _new_file(self) -> int:
        """Create the file with its header, which ties the clocks together and names the run."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, self._header) < len(self._header):
                raise OSError("disk full")
        except OSError:
            os.close(fd)
            os.unlink(self.path)  # so that a later record can create it again
            raise
        return fd


class NullEventLog(EventLog):
    """Log of a job without logs: drops records."""

    def __init__(self) -> None:
        super().__init__("")
        self._is_closed = True


def record_line(t: int, record: Record) -> bytes:
    return encode_as(b'{"t":%d,"ev":"%b"' % (t, name_of(type(record)).encode()), record) + b"\n"
