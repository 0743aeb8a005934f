"""Calls that may block on a file system, in order, in a thread: a stuck file server must not block the process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

_MOST_BYTES = 8 << 20
_CALL_S = 0.2

T = TypeVar("T")


class FileQueue:
    """Runs jobs in order in a daemon thread, started with the first job.

    A forked process has no such thread, and drops its jobs: they are the parent's.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """``most_bytes``: total size of waiting jobs."""
        self._most_bytes = most_bytes
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may add a job, too
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        """The first one is running."""
        self._bytes = 0
        self._pid: int | None = None
        self._began_s: float | None = None
        self._is_given_up = False
        self._ends = False

    def do(self, job: Callable[[], object], size: int = 0) -> bool:
        """Queue a job, which holds ``size`` bytes until it is done. Return False if there is no room or no thread."""
        if self._is_anothers():
            return True
        with self._changed:
            if self._jobs and self._bytes + size > self._most_bytes:
                return False
            if not self._begin():
                return False
            self._jobs.append((job, size))
            self._bytes += size
            self._changed.notify_all()
        return True

    def call(self, job: Callable[[], T], default: T, *, bound_s: float) -> T:
        """Return a job's result, or the default if it takes longer than ``bound_s`` seconds.

        While a late job still runs, further calls return their default at once.

        Raises:
            any exception of the job.
        """
        results: list[tuple[T, Exception | None]] = []

        def run() -> None:
            try:
                results.append((job(), None))
            except Exception as error:  # noqa: BLE001 - handed to the thread that asked, whatever it is
                results.append((default, error))

        with self._changed:
            if self._is_given_up or not self.do(run):
                return default
            if not self._changed.wait_for(lambda: bool(results), bound_s):
                self._is_given_up = True
                return default
        value, error = results[0]
        if error is not None:
            raise error
        return value

    def is_started(self) -> bool:
        """Return True once the thread exists: from the first job on, unless the system has no thread left."""
        return self._pid is not None

    def stands_for_s(self) -> float:
        """Return the seconds the current job has taken; 0 without one."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def wait(self, bound_s: float) -> bool:
        """Wait until all jobs are done, but no longer than until the current one has taken ``bound_s`` seconds.

        Return True if all are done.
        """
        if self._is_anothers():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, max(0.0, bound_s - self.stands_for_s()))

    def finish(self, bound_s: float) -> bool:
        """Take no more jobs, and wait for the queued ones as ``wait`` does."""
        if self._is_anothers():
            return True
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        return self.wait(bound_s)

    def _is_anothers(self) -> bool:
        """Return True in a fork of the thread's process, which may have held the lock at that time."""
        return self._pid is not None and self._pid != os.getpid()

    def _begin(self) -> bool:
        if self._pid is not None or self._ends:
            return not self._ends
        self._pid = os.getpid()
        try:
            threading.Thread(target=self._run, name="files", daemon=True).start()
        except RuntimeError:  # no more threads are allowed
            self._pid = None
            return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._ends:
                        return
                    self._changed.wait()
                job, size = self._jobs[0]
                self._began_s = time.monotonic()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever it is, the jobs after it are others'
                print(f"megatron_ft: {error!r}", file=sys.stderr)
            with self._changed:
                self._began_s = None
                self._is_given_up = False
                self._bytes -= size
                self._jobs.popleft()
                self._changed.notify_all()


_shared = FileQueue()


def bounded_call(job: Callable[[], T], default: T, *, bound_s: float = _CALL_S) -> T:
    """Run a file operation. Return the default if it takes too long, or an earlier one of this process still does.

    Raises:
        any exception of the job.
    """
    return _shared.call(job, default, bound_s=bound_s)
