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
SUFFIX = ".jsonl"
OLDER_SUFFIX = ".before.jsonl"  # sorted before the newer one
DEFAULT_LOG_MAX_BYTES = 200_000_000
"""Of one process. A step of training takes its monitor about 20 bytes."""


class EventLog:
    """Appends records, each one ``write`` of a whole line; a full disk loses records, never the caller.

    A file that has become too large makes place for a new one with the same header; the one before that goes.
    """

    def __init__(self, fd: int, path: str, max_bytes: int = 0) -> None:
        self._fd = fd
        self.path = path
        self._max_bytes = max_bytes
        self._bytes = 0
        self._header = b""
        self._warned = False

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        role: str,
        run_id: str,
        name: str = "",
        max_bytes: int = DEFAULT_LOG_MAX_BYTES,
        **header: Any,
    ) -> EventLog:
        """Begin a new file in ``directory`` for this process; ``name`` tells it apart from its like.

        ``max_bytes`` is what this process may keep in all, the oldest goes first; 0 is no bound.

        Raises:
            OSError: the directory can't be written.
        """
        host, pid = socket.gethostname(), os.getpid()
        wall_ns, now_ns = time.time_ns(), time.monotonic_ns()
        parts = [role, host, *([name] if name else []), str(pid), str(wall_ns)]
        path = os.path.join(directory, "-".join(parts) + SUFFIX)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log = cls(fd, path, max_bytes)
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
            self._header = self._header or line
            self._bytes += written
            if 0 < self._max_bytes < 2 * self._bytes:
                self._begin_anew()
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(f"megatron_ft: event log {self.path} lost records: {error}", file=sys.stderr)

    def _begin_anew(self) -> None:
        """Go on in a new file; there are at most two."""
        self._bytes = len(self._header)
        os.replace(self.path, self.path.removesuffix(SUFFIX) + OLDER_SUFFIX)
        new = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # the header ties the clocks together, and says to which run the file belongs: it must stay what it was
        os.write(new, self._header)
        os.dup2(new, self._fd, inheritable=False)
        os.close(new)

    def close(self) -> None:
        """No more records; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NullEventLog(EventLog):
    """A log nobody asked for."""

    def __init__(self) -> None:
        super().__init__(-1, "")
