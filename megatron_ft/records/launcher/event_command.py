"""``--ft-on-event``: the user's command gets an object on standard input, in the background, with a bound."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_ft.launcher.base.rank_environment import without_secret
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.linux.process_setup import restore_file_limit
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

    def __init__(
        self, command: str, *, reactor: Reactor, say: Callable[[str], None], setpriv: Collection[str] = ()
    ) -> None:
        """``setpriv``: words of a program that becomes the shell, as of ``worker.find_setpriv``."""
        self._command = [*setpriv, _SHELL, "-c", command]
        self._reactor = reactor
        self._say = say
        self._waiting: deque[bytes] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._timer: Timer | None = None
        self._is_told = False

    def pids(self) -> set[int]:
        """Return the PID of the running command, if any."""
        return set() if self._process is None else {self._process.pid}

    def tell(self, notification: Mapping[str, Any]) -> None:
        """Run the command for this object, after those that wait; too many are dropped, the oldest first."""
        self._waiting.append(json.dumps(notification).encode() + b"\n")
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._complain("is too slow: an event is dropped")
        self._start_next()

    def close(self) -> None:
        """Wait for what is left, with a bound, serving everything else; then kill it."""
        until_s = time.monotonic() + LAST_S
        self._reactor.run_until(lambda: self._process is None, until_s)
        self._waiting.clear()
        self._kill()

    def _start_next(self) -> None:
        while self._process is None and self._waiting:
            try:
                self._start(self._waiting.popleft())
            except OSError as error:
                self._complain(f"could not be started: {error.strerror}")

    def _start(self, data: bytes) -> None:
        # a file in memory: a command that reads nothing holds up no writer
        stdin = os.memfd_create("event", os.MFD_CLOEXEC)
        try:
            os.write(stdin, data)
            os.lseek(stdin, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self._command,
                env=without_secret(os.environ),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        self._process = process
        restore_file_limit(process.pid)
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            self._kill()
            raise
        self._reactor.watch(self._pidfd, self._ended, Priority.DEATH)
        self._timer = self._reactor.call_later(BOUND_S, self._overdue)

    def _overdue(self) -> None:
        self._complain(f"took longer than {BOUND_S:g} s: it is killed")
        self._signal()

    def _ended(self) -> None:
        code = self._kill()
        if code is not None and code > 0:
            self._complain(f"exited with code {code}")
        elif code is not None and code < 0 and code != -signal.SIGKILL:
            self._complain(f"was killed by {exit_words(code)}")
        self._start_next()

    def _signal(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _kill(self) -> int | None:
        """End what is left of the command, and forget it. Return how it ended; None if it is stuck in the kernel."""
        self._signal()
        process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd >= 0:
            self._reactor.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_GONE_S)
        return None

    def _complain(self, what: str) -> None:
        """Print the first complaint only: the command of a job with many restarts may fail each time."""
        if not self._is_told:
            self._is_told = True
            self._say(f"--ft-on-event: the command {what}")
