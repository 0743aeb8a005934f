"""One process's own event log: one JSON object a line, in a directory that stays after the run.

Every record is one of ``core.facts``, with ``t``, nanoseconds of CLOCK_MONOTONIC, and ``ev``, its name. The first
one, ``log_opened``, says who writes and ties that clock to the wall clock, so that logs of several nodes can be merged.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ft.core.codec import pack
from megatron_ft.core.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.core.facts import SCHEMA, shared
from megatron_ft.ipc.files.file_thread import FileThread
from megatron_ft.ipc.files.standard_error import put
from megatron_ft.ipc.linux.kept_descriptor import KeptDescriptor

if TYPE_CHECKING:
    from megatron_ft.core.facts.all_kinds import Record  # at run time each process imports its own

SUFFIX = ".jsonl"
OLDER_SUFFIX = ".before.jsonl"  # sorted before the newer one
FLUSH_S = 2.0
"""How long the end of a process may wait for its log."""
_TELL_AFTER_S = 10.0


class EventLog:
    """Appends records, each one ``write`` of a whole line, in a thread of its own: no caller waits for a disk.

    A full disk, or one that doesn't answer, loses records, which is reported; where records are missing in the file,
    one called ``records_lost`` says how many. A file that has become too large makes place for a new one with the same
    header; the one before that goes.
    """

    def __init__(self, path: str, max_bytes: int = 0) -> None:
        self.path = path
        self._files = FileThread()
        self._is_closed = False
        self._lost = 0
        self._told: set[str] = set()
        # the thread's
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
    ) -> EventLog:
        """Begin a new file in ``directory`` for this process, soon; ``name`` tells it apart from its like.

        ``max_bytes`` is what this process may keep in all, the oldest goes first; 0 is no bound.
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
        )
        log._header = _line(now_ns, header)
        log._append(b"")
        atexit.register(log.close)
        return log

    def write(self, record: Record, *, t: int | None = None) -> None:
        """Append one record; ``t`` is when it happened (monotonic ns) if that isn't now."""
        if self._is_closed:
            return
        now_ns = time.monotonic_ns()
        line = _line(now_ns if t is None else t, record)
        if self._lost:
            line = _line(now_ns, shared.RecordsLost(count=self._lost)) + line
        if self._append(line):
            self._lost = 0
        else:
            self._lost += 1
            self._tell("full", "loses records: too many wait for its directory to answer")
        if self._files.stands_for_s() > _TELL_AFTER_S:
            self._tell("silent", f"can't be written: its directory hasn't answered for {_TELL_AFTER_S:g} s")

    def do(self, job: Callable[[], object]) -> None:
        """Have something else done with files, after what was written before."""
        if not self._is_closed:
            self._files.do(job)

    def flush(self, bound_s: float = FLUSH_S) -> bool:
        """Wait until all is written, ``bound_s`` seconds at most; whether it is."""
        return self._files.wait(bound_s)

    def close(self, bound_s: float = FLUSH_S) -> None:
        """No more records; what isn't written within ``bound_s`` seconds is lost. Again, it does nothing."""
        if self._is_closed:
            return
        # one that hasn't answered for so long already isn't waited for
        until_s = time.monotonic() + max(0.0, bound_s - self._files.stands_for_s())
        self._files.wait(until_s - time.monotonic())  # first of all: what is being done may write a record, too
        self._is_closed = True
        atexit.unregister(self.close)
        self._files.do(self._shut)
        if not self._files.finish(max(0.0, until_s - time.monotonic())):
            self._tell("unwritten", "lost its last records: its directory doesn't answer")

    def _append(self, lines: bytes) -> bool:
        return self._files.do(functools.partial(self._write, lines), len(lines))

    def _tell(self, kind: str, text: str) -> None:
        """One of each kind."""
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
                # a torn line would hide the next one too: end it, the reader passes over it
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
        """It begins with the header, which ties the clocks together, and says to which run the file belongs."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, self._header) < len(self._header):
                raise OSError("disk full")
        except OSError:
            os.close(fd)
            os.unlink(self.path)  # so that a later record can begin it again
            raise
        return fd

    def _shut(self) -> None:
        self._file.close()


class NullEventLog(EventLog):
    """A log of a job that keeps none: records are dropped."""

    def __init__(self) -> None:
        super().__init__("")
        self._is_closed = True


def _line(t: int, record: Record) -> bytes:
    return json.dumps({"t": t, **pack(record, "ev", full=True)}, separators=(",", ":")).encode() + b"\n"
