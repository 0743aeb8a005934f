"""``--ft-on-event``: the user's command gets an object on standard input, in the background, with a bound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.launcher.base.rank_environment import without_secret
from megatron_ft.launcher.processes.worker import Worker, start
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.reactor import Priority, Reactor, Timer

BOUND_S = 30.0
"""Seconds a command may take."""
LAST_S = 10.0
"""Seconds the launcher's end may wait for all that are left."""
_MOST_WAITING = 16
_GONE_S = 1.0
"""Seconds for a killed process to end; one that is stuck in the kernel isn't waited for."""
_SHELL = "/bin/sh"


class EventCommand:
    """Runs the command for one object after the other."""

    def __init__(self, command: str, *, reactor: Reactor, say: Callable[[str], None]) -> None:
        self._command = [_SHELL, "-c", command]
        self._reactor = reactor
        self._say = say
        self._waiting: deque[bytes] = deque()
        self._worker: Worker | None = None
        self._timer: Timer | None = None
        self._is_told = False

    def pids(self) -> set[int]:
        """Return the PID of the running command, if any."""
        return set() if self._worker is None else {self._worker.pid}

    def tell(self, notification: Mapping[str, Any]) -> None:
        """Run the command for this object, after those that wait; too many are dropped, the oldest first."""
        self._waiting.append(json.dumps(notification).encode() + b"\n")
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._complain("is too slow: an event is dropped")
        self._start_next()

    def close(self) -> None:
        """Wait for what is left, with a bound, serving everything else; then kill it."""
        self._wait(LAST_S)
        self._waiting.clear()
        self._kill()
        self._wait(_GONE_S)

    def _wait(self, seconds: float) -> None:
        self._reactor.run_until(lambda: self._worker is None, time.monotonic() + seconds)

    def _start_next(self) -> None:
        while self._worker is None and self._waiting:
            data, null = self._waiting.popleft(), subprocess.DEVNULL
            try:
                # a file in memory: a command that reads nothing holds up no writer
                with open(os.memfd_create("event", os.MFD_CLOEXEC), "w+b", buffering=0) as stdin:
                    stdin.write(data)
                    stdin.seek(0)
                    worker = start(
                        *(self._command, without_secret(os.environ)),
                        on_exit=self._ended,
                        stdin=stdin,
                        stdout=null,
                        stderr=null,
                    )
            except OSError as error:
                self._complain(f"could not be started: {error.strerror}")
                continue
            self._worker = worker
            self._reactor.watch(worker.pidfd, worker.poll_end, Priority.DEATH)
            self._timer = self._reactor.call_later(BOUND_S, self._overdue)

    def _overdue(self) -> None:
        self._complain(f"took longer than {BOUND_S:g} s: it is killed")
        self._kill()

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.signal(signal.SIGKILL, whole_group=True)

    def _ended(self, worker: Worker) -> None:
        self._kill()  # what it has left behind
        self._reactor.unwatch(worker.pidfd)
        worker.reap()
        self._worker = None
        if self._timer is not None:
            self._timer.cancel()
        if worker.exitcode and worker.exitcode > 0:
            self._complain(f"exited with code {worker.exitcode}")
        elif worker.exitcode and signal.SIGKILL not in worker.signals_sent:
            self._complain(f"was killed by {exit_words(worker.exitcode)}")
        self._start_next()

    def _complain(self, what: str) -> None:
        """Print the first complaint only: the command of a job with many restarts may fail each time."""
        if not self._is_told:
            self._is_told = True
            self._say(f"--ft-on-event: the command {what}")
