"""A thread for what may wait for a file system: a file server that doesn't answer must not block the process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

_MOST_BYTES = 8 << 20

T = TypeVar("T")


class FileThread:
    """Does jobs one after the other, in a daemon thread that begins with the first one.

    A process that is forked has no such thread, and its jobs are dropped: they are its parent's to do.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """``most_bytes`` may wait to be done."""
        self._most_bytes = most_bytes
        self._changed = threading.Condition()  # its lock may be taken twice: a signal handler may have a job, too
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        """The first one is being done."""
        self._bytes = 0
        self._pid: int | None = None
        self._began_s: float | None = None
        self._is_given_up = False
        self._ends = False

    def do(self, job: Callable[[], object], size: int = 0) -> bool:
        """Have a job done, which takes ``size`` bytes as long as it waits; False if there is no room for it."""
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
        """What a job returns, or the default if it takes longer than ``bound_s`` seconds.

        While a late job still runs, further calls return their default at once.

        Raises:
            whatever the job raises.
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
        """Whether there is a thread: it begins with the first job, unless the system has none left."""
        return self._pid is not None

    def stands_for_s(self) -> float:
        """How long the job that is being done has taken, in seconds; 0 if there is none."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def wait(self, bound_s: float) -> bool:
        """Wait until all jobs are done, ``bound_s`` seconds at most; whether they are."""
        if self._is_anothers():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, bound_s)

    def finish(self, bound_s: float) -> bool:
        """Take no more jobs, and wait for those that there are."""
        if self._is_anothers():
            return True
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        return self.wait(bound_s)

    def _is_anothers(self) -> bool:
        """Whether this is a fork of the process whose thread it is, which may have held the lock then."""
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
