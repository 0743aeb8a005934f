"""Ranks as processes: started, signalled, also by the user, and seen to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.launcher.processes import ending_together
from megatron_ft.link import process_tree
from megatron_ft.link.linux.process_setup import die_with_parent, restore_file_limit, soft_limit_before
from megatron_ft.link.linux.processes import send_signal, signal_main_thread
from megatron_ft.link.messages.fork_server_messages import RankSpec
from megatron_ft.run_ahead.forking_spawner import ForkingSpawner


@dataclass
class Worker:
    """One rank's process: leader of its own session and process group, child of the launcher, unreaped till the end."""

    local_rank: int
    pid: int
    pidfd: int
    on_exit: Callable[[Worker], None]
    """Called once, when the end is seen."""
    on_reaped: Callable[[int], None] = lambda _code: None
    started_at_ns: int = field(default_factory=time.monotonic_ns)
    exitcode: int | None = None
    """Exit code as in ``subprocess``; None while it lives."""
    exited_at_ns: int = 0
    signals_sent: set[int] = field(default_factory=set)
    """Signals sent by the launcher, and reported ones of the rank's monitor."""
    signalled_at_ns: int = 0
    """Time of the launcher's first signal that may end it (CLOCK_MONOTONIC)."""
    reaped: bool = False

    @classmethod
    def of(
        cls, process: subprocess.Popen[bytes], local_rank: int = 0, on_exit: Callable[[Worker], None] = lambda _: None
    ) -> Worker:
        """Take over a process that has just been started.

        Raises:
            OSError: there is no descriptor left.
        """

        def on_reaped(code: int) -> None:
            process.returncode = code  # otherwise Popen would wait for a number that may be reused by then

        return cls(local_rank, process.pid, os.pidfd_open(process.pid), on_exit, on_reaped)

    def poll_end(self) -> bool:
        """Note its end, and call ``on_exit``, when it is first seen. Return True if it has ended."""
        if self.exitcode is None:
            self.exitcode = process_tree.exit_code_unreaped(self.pid)
            if self.exitcode is not None:
                self.exited_at_ns = time.monotonic_ns()
                self.on_exit(self)
        return self.exitcode is not None

    def signal(self, number: int, *, whole_group: bool) -> None:
        """Send a signal to the rank, or to its whole group (also when the rank itself has ended)."""
        assert not self.reaped, "the number may be another's by now"
        if self.exitcode is None and number != signal.SIGCONT:  # SIGCONT ends no process
            self.signals_sent.add(number)
            self.signalled_at_ns = self.signalled_at_ns or time.monotonic_ns()
        if whole_group:
            try:
                os.killpg(self.pid, number)
            except PermissionError:
                pass  # all of the group belong to another user now (sudo): reported later if they live on
            except ProcessLookupError:
                # just forked, and not yet leader of its group; or nothing of it is left
                send_signal(self.pidfd, number)
        else:
            signal_main_thread(self.pid, self.pidfd, number)

    def reap(self) -> None:
        """Reap the process, once it has ended and nothing of its group is left."""
        assert self.exitcode is not None
        if not self.reaped:
            process_tree.reap(self.pid)
            self.reaped = True
            os.close(self.pidfd)
            self.on_reaped(self.exitcode)


WorkerCallback = Callable[[Worker], None]


Spawn = Callable[[Sequence[RankSpec], WorkerCallback, WorkerCallback], None]
"""Starts ranks, each a child of the launcher and leader of its own session. The callbacks: with each rank immediately,
and when its end is seen. Raises OSError if a rank can't be started; those before it were."""


class Spawner:
    """Has ranks forked, or starts their command itself. Ranks die with the launcher, even with one that is killed."""

    def __init__(self, forking: ForkingSpawner | None = None) -> None:
        """``forking``: None if ranks are never forked."""
        self._forking = forking
        self._setpriv = find_setpriv()

    def spawn(self, specs: Sequence[RankSpec], on_spawned: WorkerCallback, on_exit: WorkerCallback) -> None:
        def adopt(spec: RankSpec, pid: int) -> None:
            on_spawned(Worker(spec.local_rank, pid, os.pidfd_open(pid), on_exit))

        if self._forking is not None and self._forking.fork(specs, adopt):
            return
        with ending_together.wait_for_each_other([spec.argv for spec in specs]) as (variables, inherited):
            for spec in specs:
                on_spawned(self._spawn(spec, variables, inherited, on_exit))

    def _spawn(
        self,
        spec: RankSpec,
        variables: Mapping[str, str],
        inherited: Sequence[int],
        on_exit: WorkerCallback,
    ) -> Worker:
        launcher_pid = os.getpid()

        def in_child() -> None:
            die_with_parent()
            restore_file_limit()
            # the launcher may have died before die_with_parent took effect
            if os.getppid() != launcher_pid:
                os._exit(1)

        with contextlib.ExitStack() as files:
            out = files.enter_context(open(spec.stdout, "w")) if spec.stdout else None
            err = files.enter_context(open(spec.stderr, "w")) if spec.stderr else None
            process = subprocess.Popen(
                [*self._setpriv, *spec.argv],
                env={**spec.env, **variables},
                pass_fds=inherited,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=None if self._setpriv else in_child,
            )

        return Worker.of(process, spec.local_rank, on_exit)


def find_setpriv() -> list[str]:
    """Return the command of util-linux's setpriv, which sets the parent-death signal and becomes the rank; empty
    without.

    Preceded by prlimit, if the launcher has raised its own limit of open files. Setting it from Python needs a fork of
    this process, with all of torch in it: 7 ms for each rank on a quiet machine, 30 on a busy one, where this costs
    none.
    """
    path = shutil.which("setpriv")
    if path is None:
        return []
    command = [path, "--pdeathsig", "KILL", "--"]
    soft_limit = soft_limit_before()
    if soft_limit is not None:
        prlimit = shutil.which("prlimit")
        if prlimit is None:
            return []
        command = [prlimit, f"--nofile={soft_limit}:", *command]
    # other programs of that name (busybox) don't know the option
    known = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return command if known.returncode == 0 else []
