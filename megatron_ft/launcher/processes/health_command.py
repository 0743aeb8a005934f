"""``--ft-node-health-command``: run with a bound, and ended whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from megatron_ft.core.config.launcher_options import LauncherOptions
from megatron_ft.core.facts.launcher import NodeHealth
from megatron_ft.core.node_problems import DIRECTORIES_VARIABLE
from megatron_ft.core.wording import printable
from megatron_ft.ipc.linux import process_tree
from megatron_ft.ipc.linux.process_setup import restore_file_limit_of
from megatron_ft.ipc.linux.processes import read_stat, with_owner
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.rank_environment import without_secret
from megatron_ft.launcher.processes.worker import find_setpriv
from megatron_ft.link.reactor import Priority, Reactor

_SHELL = "/bin/sh"
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"
_NOT_STARTED = 127
_GONE_WAIT_S = 2.0
"""Seconds for a process to end by SIGKILL; one that is stuck in the kernel isn't waited for."""
_LOOK_AGAIN_S = 0.01
"""Interval of looks at a process that isn't a child of the launcher, whose end isn't notified."""
_KEPT_BYTES = 4096


def job_directories(options: LauncherOptions, log_dir: str | None) -> list[str]:
    """Return the directories that this job is known to write to."""
    files = (options.checkpoint_iteration_file, os.environ.get(FINISHED_FLAG))
    found = [log_dir, *(os.path.dirname(os.path.abspath(file)) for file in files if file)]
    return list(dict.fromkeys(filter(None, found)))


class HealthCheck:
    """Runs the command, one at a time, while everything else is served."""

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
        self._known_children = known_children
        self._directories = os.pathsep.join(directories)
        self._setpriv = find_setpriv()
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._is_stuck = False
        """True if it has survived SIGKILL."""

    def pids(self) -> set[int]:
        """Return the PID of the running process, if any."""
        return set() if self._process is None else {self._process.pid}

    def run(self, cycle: int, environment: Mapping[str, str], check: Callable[[], None]) -> NodeHealth:
        """Run the command; ``check`` is called after each event.

        Raises:
            any exception of ``check``; then the command is killed.
        """
        began_s = time.monotonic()

        def checked(ended: str, code: int | None, told: str | None = None) -> NodeHealth:
            return NodeHealth(
                cycle=cycle,
                good=not ended,
                exit_code=code,
                text=ended,
                last_line=last_line(self._output) if told is None else told,
                seconds=time.monotonic() - began_s,
            )

        if self._process is not None and not self._let_go():
            return checked(f"can't run: {self._left()} of the previous check can't be killed", None, "")
        self._output = b""
        try:
            process, pidfd = self._start(environment)
        except OSError as error:
            return checked("could not be started", _NOT_STARTED, str(error))
        try:
            code = self._wait(process, pidfd, None if self._timeout_s is None else began_s + self._timeout_s, check)
        finally:
            self.close()
        if code is None:
            return checked(f"took longer than {self._timeout_s:g} s", None)
        if code < 0:
            return checked(f"was killed by {launcher_lines.exit_code(code)}", code)
        return checked(f"exited with code {code}" if code else "", code)

    def close(self) -> None:
        """Kill what is left of the command, serving everything else. A stuck one is waited for only once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + (0.0 if self._is_stuck else _GONE_WAIT_S)
        # a served callback may have closed it, too
        while self._process is not None and not self._let_go() and time.monotonic() < deadline_s:
            self._reactor.run_once(_LOOK_AGAIN_S)
        self._is_stuck = self._process is not None

    def _start(self, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
        """Return its process and pidfd.

        Raises:
            OSError: it can't be started or waited for; then it is killed.
        """
        process = self._process = subprocess.Popen(
            [*self._setpriv, _SHELL, "-c", self._command],
            env={**without_secret(os.environ), DIRECTORIES_VARIABLE: self._directories, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if not self._setpriv:
            restore_file_limit_of(process.pid)
        try:
            return process, os.pidfd_open(process.pid)
        except OSError:
            assert process.stdout is not None
            process.stdout.close()
            self.close()
            raise

    def _wait(
        self, process: subprocess.Popen[bytes], pidfd: int, deadline_s: float | None, check: Callable[[], None]
    ) -> int | None:
        """Return the exit code; None at the deadline."""
        assert process.stdout is not None
        out_fd = process.stdout.fileno()
        os.set_blocking(out_fd, False)

        def has_ended() -> bool:
            if process_tree.exit_code_unreaped(process.pid) is not None:
                return True
            check()
            return False

        self._reactor.watch(pidfd, lambda: None, Priority.DEATH)
        self._reactor.watch(out_fd, lambda: self._read(out_fd))
        try:
            self._reactor.run_until(has_ended, deadline_s)
            self._read(out_fd)
            return process_tree.exit_code_unreaped(process.pid)
        finally:
            self._reactor.unwatch(pidfd)
            self._reactor.unwatch(out_fd)
            os.close(pidfd)
            process.stdout.close()

    def _read(self, fd: int) -> None:
        """Keep the end of its output. Output of a process that has left the command's session isn't waited for."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # endless output must not keep the launcher
                data = os.read(fd, 65536)
                if not data:
                    self._reactor.unwatch(fd)
                    return
                self._output = (self._output + data)[-_KEPT_BYTES:]

    def _let_go(self) -> bool:
        """Return True if nothing of it is left; then it is reaped."""
        process = self._process
        assert process is not None
        code = process_tree.exit_code_unreaped(process.pid)
        if code is None:
            return False
        left = process_tree.left_behind([process.pid], self._known_children())
        process_tree.kill_left(left, [process.pid])
        if left:
            return False
        process_tree.reap(process.pid)
        process.returncode = code  # otherwise Popen would wait for a number that may be reused by then
        self._process = None
        return True

    def _left(self) -> str:
        """Describe its processes that can't be killed: its shell, or what that has left."""
        assert self._process is not None
        pid = self._process.pid
        shell = read_stat(pid)
        left = process_tree.left_behind([pid], self._known_children())
        if shell is not None and shell.state not in "ZX":
            left.append(shell)
        return launcher_lines.stuck([with_owner(stat) for stat in left]) if left else f"process {pid}"


def last_line(output: bytes) -> str:
    """Return the last line that isn't empty, harmless for a terminal."""
    found = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return printable(found[-1].strip()) if found else ""
