"""One process's own event log: one JSON object a line, in a directory that stays after the run.

Every record has ``t``, nanoseconds of CLOCK_MONOTONIC, and ``ev``, its name. The first one, ``log_opened``,
says who writes and ties that clock to the wall clock, so that logs of several nodes can be merged.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

SCHEMA = 1


class EventLog:
    """Appends records, each one ``write`` of a whole line; a full disk loses records, never the caller."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path
        self._warned = False

    @classmethod
    def open(cls, directory: str, *, role: str, run_id: str, name: str = "", **header: Any) -> EventLog:
        """Begin a new file in ``directory`` for this process; ``name`` tells it apart from its like.

        Raises:
            OSError: the directory can't be written.
        """
        host, pid = socket.gethostname(), os.getpid()
        wall_ns, now_ns = time.time_ns(), time.monotonic_ns()
        parts = [role, host, *([name] if name else []), str(pid), str(wall_ns)]
        path = os.path.join(directory, "-".join(parts) + ".jsonl")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log = cls(fd, path)
        log.write(
            "log_opened",
            t=now_ns,
            schema=SCHEMA,
            role=role,
            host=host,
            pid=pid,
            run_id=run_id,
            wall_ns=wall_ns,
            **header,
        )
        return log

    def write(self, ev: str, /, *, t: int | None = None, **fields: Any) -> None:
        """Append one record; ``t`` is when it happened (monotonic ns) if that isn't now."""
        if self._fd < 0:
            return
        record = {"t": time.monotonic_ns() if t is None else t, "ev": ev, **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                # a torn line would hide the next one too: end it, the reader passes over it
                os.write(self._fd, b"\n")
                raise OSError("disk full")
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(f"megatron_ft: event log {self.path} lost records: {error}", file=sys.stderr)

    def close(self) -> None:
        """No more records; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NullEventLog(EventLog):
    """A log nobody asked for."""

    def __init__(self) -> None:
        super().__init__(-1, "")
