"""``--ft-node-health-command``: run with a bound, and ended whole."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from megatron_ft.config.launcher_options import LauncherOptions
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.rank_environment import without_secret
from megatron_ft.launcher.processes.worker import Termination, Worker, start
from megatron_ft.link.base.rank_variables import DIRECTORIES_VARIABLE
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.base.wording import printable
from megatron_ft.link.facts.launcher import NodeHealth
from megatron_ft.link.reactor import Priority, Reactor

_SHELL = "/bin/sh"
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"
_NOT_STARTED = 127
_GONE_WAIT_S = 2.0
"""Seconds for a process to end by SIGKILL; one that is stuck in the kernel isn't waited for."""
_KEPT_BYTES = 4096


def command_of(options: LauncherOptions) -> str | None:
    """Return the shell command that checks this node's health; None if none is asked for.

    This package's own checks come first.
    """
    own = ["mounts"] if options.enable_dist_storage_healthcheck else []
    words = [sys.executable, "-m", "megatron_ft", "node-health"]
    if options.segment_health_check_dir is not None:
        own.append("segment")
        words += ["--segment-health-check-dir", options.segment_health_check_dir]
    if not own:
        return options.node_health_command
    first = shlex.join([*words, ",".join(own)])
    return first if options.node_health_command is None else f"{first} && {{ {options.node_health_command}\n}}"


def job_directories(options: LauncherOptions, log_dir: str | None) -> list[str]:
    """Return the directories that this job is known to write to."""
    files = (options.checkpoint_iteration_file, os.environ.get(FINISHED_FLAG))
    found = [log_dir, *(os.path.dirname(os.path.abspath(file)) for file in files if file)]
    return list(dict.fromkeys(filter(None, found)))


class HealthCheck:
    """Runs the command, one at a time, while everything else is served, and ends it as a rank is ended."""

    def __init__(
        self,
        command: str,
        *,
        timeout_s: float | None,
        reactor: Reactor,
        known_children: Callable[[], Collection[int]],
        directories: Sequence[str] = (),
    ) -> None:
        """A timeout of None is none; ``known_children`` are no leftovers of it.

        ``directories``: as of `job_directories`.
        """
        self._command = command
        self._timeout_s = timeout_s
        self._reactor = reactor
        self._directories = os.pathsep.join(directories)
        self._termination = Termination(
            reactor,
            known_children=known_children,
            in_a_hurry=lambda: False,
            say=lambda _text: None,  # the next check says so
            kill_wait_s=_GONE_WAIT_S,
        )
        self._worker: Worker | None = None
        self._output = b""

    def pids(self) -> set[int]:
        """Return the PID of the running process, if any."""
        return set() if self._worker is None or self._worker.reaped else {self._worker.pid}

    def run(self, cycle: int, environment: Mapping[str, str], check: Callable[[], None]) -> NodeHealth:
        """Run the command; ``check`` is called after each event.

        Raises:
            any exception of ``check``; then the command is killed.
        """
        began_s = time.monotonic()

        def checked(ended: str, code: int | None, told: str | None = None) -> NodeHealth:
            lines = [line.strip() for line in self._output.decode(errors="replace").splitlines() if line.strip()]
            last = printable(lines[-1]) if lines else ""  # harmless for a terminal
            return NodeHealth(
                cycle=cycle,
                good=not ended,
                exit_code=code,
                text=ended,
                last_line=last if told is None else told,
                seconds=time.monotonic() - began_s,
            )

        if self._worker is not None and (left := self._termination.still_there([self._worker])):
            return checked(f"can't run: {launcher_lines.stuck(left)} of the previous check can't be killed", None, "")
        self._output = b""
        try:
            self._worker = start(
                [_SHELL, "-c", self._command],
                {**without_secret(os.environ), DIRECTORIES_VARIABLE: self._directories, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return checked("could not be started", _NOT_STARTED, str(error))
        try:
            code = self._wait(self._worker, began_s + (self._timeout_s or math.inf), check)
        finally:
            self.close()
        if code is None:
            return checked(f"took longer than {self._timeout_s:g} s", None)
        if code < 0:
            return checked(f"was killed by {exit_words(code)}", code)
        return checked(f"exited with code {code}" if code else "", code)

    def close(self) -> None:
        """Kill what is left of the command, serving everything else. A stuck one is waited for only once."""
        if self._worker is not None and not self._worker.reaped:
            self._termination.end([self._worker], signal.SIGKILL, 0.0)

    def _wait(self, worker: Worker, deadline_s: float, check: Callable[[], None]) -> int | None:
        """Return the exit code; None at the deadline."""
        assert worker.process is not None
        output = worker.process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)

        def has_ended() -> bool:
            if worker.poll_end():
                return True
            check()
            return False

        self._reactor.watch(worker.pidfd, lambda: None, Priority.DEATH)
        self._reactor.watch(output.fileno(), lambda: self._read(output.fileno()))
        try:
            self._reactor.run_until(has_ended, None if math.isinf(deadline_s) else deadline_s)
            self._read(output.fileno())
            return worker.exitcode
        finally:
            self._reactor.unwatch(worker.pidfd)
            self._reactor.unwatch(output.fileno())
            output.close()

    def _read(self, fd: int) -> None:
        """Keep the end of its output. Output of a process that has left the command's session isn't waited for."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # endless output must not keep the launcher
                data = os.read(fd, 65536)
                if not data:
                    self._reactor.unwatch(fd)
                    return
                self._output = (self._output + data)[-_KEPT_BYTES:]
