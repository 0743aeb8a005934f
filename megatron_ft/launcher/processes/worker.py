"""Ranks as processes: started, signalled, seen to end, and terminated with their process groups.

Termination is a signal, a grace in seconds, SIGKILL; stopped processes are continued.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.processes import ending_together
from megatron_ft.link import process_tree
from megatron_ft.link.linux.process_setup import die_with_parent, restore_file_limit, soft_limit_before
from megatron_ft.link.linux.processes import ProcessStat, read_stat, send_signal, signal_main_thread, with_owner
from megatron_ft.link.messages.fork_server_messages import RankSpec
from megatron_ft.link.reactor import Reactor
from megatron_ft.run_ahead.forking_spawner import ForkingSpawner


@dataclass
class Worker:
    """One rank's process: leader of its own session and process group, child of the launcher, unreaped till the end."""

    local_rank: int
    pid: int
    pidfd: int
    on_exit: Callable[[Worker], None]
    """Called once, when the end is seen."""
    process: subprocess.Popen[bytes] | None = None
    """Told of its end when it is reaped: otherwise Popen would wait for a number that may be reused by then."""
    started_at_ns: int = field(default_factory=time.monotonic_ns)
    exitcode: int | None = None
    """Exit code as in ``subprocess``; None while it lives."""
    exited_at_ns: int = 0
    signals_sent: set[int] = field(default_factory=set)
    """Signals sent by the launcher, and reported ones of the rank's monitor."""
    signalled_at_ns: int = 0
    """Time of the launcher's first signal that may end it (CLOCK_MONOTONIC)."""
    reaped: bool = False

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
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED)
            self.reaped = True
            os.close(self.pidfd)
            if self.process is not None:
                self.process.returncode = self.exitcode


WorkerCallback = Callable[[Worker], None]


def spawn(
    specs: Sequence[RankSpec],
    on_spawned: WorkerCallback,
    on_exit: WorkerCallback,
    forking: ForkingSpawner | None = None,
) -> None:
    """Have ranks forked, or start their command. Each is a child of the launcher, and leader of its own session. Ranks
    die with the launcher, even with one that is killed.

    The callbacks: with each rank immediately, and when its end is seen. ``forking``: None if ranks are never forked.

    Raises:
        OSError: a rank can't be started; those before it were.
    """

    def adopt(spec: RankSpec, pid: int) -> None:
        on_spawned(Worker(spec.local_rank, pid, os.pidfd_open(pid), on_exit))

    if forking is not None and forking.fork(specs, adopt):
        return
    with ending_together.wait_for_each_other([spec.argv for spec in specs]) as (variables, inherited):
        for spec in specs:
            with contextlib.ExitStack() as files:
                out = files.enter_context(open(spec.stdout, "w")) if spec.stdout else None
                err = files.enter_context(open(spec.stderr, "w")) if spec.stderr else None
                env = {**spec.env, **variables}
                worker = start(spec.argv, env, spec.local_rank, on_exit, pass_fds=inherited, stdout=out, stderr=err)
            on_spawned(worker)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    local_rank: int = 0,
    on_exit: WorkerCallback = lambda _worker: None,
    **popen: Any,
) -> Worker:
    """Start a process as leader of its own session; it dies with the launcher. ``popen``: other arguments of ``Popen``.

    Raises:
        OSError: it can't be started or waited for; then it is killed.
    """
    launcher_pid, setpriv = os.getpid(), find_setpriv(soft_limit_before())

    def in_child() -> None:
        die_with_parent()
        restore_file_limit()
        # the launcher may have died before die_with_parent took effect
        if os.getppid() != launcher_pid:
            os._exit(1)

    preexec_fn = None if setpriv else in_child
    process = subprocess.Popen([*setpriv, *argv], env=env, start_new_session=True, preexec_fn=preexec_fn, **popen)
    try:
        return Worker(local_rank, process.pid, os.pidfd_open(process.pid), on_exit, process)
    except OSError:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


@functools.cache
def find_setpriv(soft_limit: int | None) -> list[str]:
    """Return the command of util-linux's setpriv, which sets the parent-death signal and becomes the rank; empty
    without.

    Preceded by prlimit, if the launcher has raised its own limit of open files from this ``soft_limit``. Setting it
    from Python needs a fork of this process, with all of torch in it: 7 ms for each rank on a quiet machine, 30 on a
    busy one, where this costs none.
    """
    path = shutil.which("setpriv")
    if path is None:
        return []
    command = [path, "--pdeathsig", "KILL", "--"]
    if soft_limit is not None:
        prlimit = shutil.which("prlimit")
        if prlimit is None:
            return []
        command = [prlimit, f"--nofile={soft_limit}:", *command]
    # other programs of that name (busybox) don't know the option
    known = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return command if known.returncode == 0 else []


KILL_WAIT_S = 10.0
"""Seconds for a process to end by SIGKILL (a large one takes seconds) before it is given up."""
_LEFTOVER_GRACE_S = 1.0
"""Seconds for a rank's leftovers to end by themselves, such as a resource tracker that removes shared memory."""
_LOOK_AGAIN_S = 0.01


@dataclass
class Termination:
    """Terminates groups of ranks; everything else is served meanwhile."""

    reactor: Reactor
    _: KW_ONLY
    known_children: Callable[[], Collection[int]]
    """PIDs of children that are no leftovers."""
    in_a_hurry: Callable[[], bool]
    """True if no process is to be waited for any more."""
    say: Callable[[str], None]
    kill_wait_s: float = KILL_WAIT_S
    _stuck: list[ProcessStat] = field(default_factory=list)
    """Ranks and processes of their groups that survived SIGKILL: not waited for again."""
    _let_go: set[int] = field(default_factory=set)

    def end(self, workers: list[Worker], number: int, grace_s: float) -> None:
        """Signal live ranks, wait unless ``in_a_hurry``, SIGKILL the remaining ones, clear their groups, and reap them.

        The grace is one for all of them, by the clock: the user's time for a cycle to end, not extended by waits for a
        CPU, unlike that of `link.base.escalation`, which ends one hung rank. With a grace below a second, leftovers get
        no more time than the ranks.
        """
        is_quick = grace_s < _LEFTOVER_GRACE_S
        self.ask(workers, number, whole_group=True)
        if is_quick:
            _ask(worker for worker in workers if worker.poll_end())
        hoped_for, until_s = self._hoped_for(workers), time.monotonic() + grace_s
        self.reactor.run_until(lambda: self.in_a_hurry() or _all_ended(hoped_for), until_s)
        self.kill(workers, with_leftovers=is_quick)
        self.clear(workers, ask=not is_quick, at_once=is_quick)

    def ask(self, workers: list[Worker], number: int, *, whole_group: bool) -> None:
        """Signal live ranks."""
        _ask((worker for worker in workers if not worker.poll_end()), number, whole_group=whole_group)

    def kill(self, workers: list[Worker], *, with_leftovers: bool = False) -> None:
        """SIGKILL the groups of live ranks; ``with_leftovers``: also what ended ranks have left, to end meanwhile."""
        stubborn = [worker for worker in workers if not worker.poll_end()]
        for worker in stubborn:
            worker.signal(signal.SIGKILL, whole_group=True)
        ended = [each for each in workers if with_leftovers and each.exitcode is not None and not each.reaped]
        left = [each for each in self._left_behind(ended) if not process_tree.tidies_up(each)] if ended else []
        process_tree.kill_left(left, _pids(ended))
        hoped_for = self._hoped_for(stubborn)
        self.reactor.run_until(lambda: _all_ended(hoped_for), deadline_s=time.monotonic() + self.kill_wait_s)
        stuck = _stats([worker.pid for worker in hoped_for if not worker.poll_end()])
        if stuck:
            self._stuck += stuck
            self.say(launcher_lines.did_not_end(stuck, waited_s=self.kill_wait_s))

    def still_there(self, workers: Collection[Worker]) -> list[ProcessStat]:
        """Return live processes of these ranks and their groups that could not be ended; reap those that have ended."""
        if self._stuck:
            self.clear([worker for worker in workers if not worker.reaped])
        sessions = {stat.pid: stat.session for stat in self._stuck}
        self._stuck = [stat for stat in _stats(list(sessions)) if stat.session == sessions[stat.pid]]
        return self._stuck

    def take_let_go(self) -> set[int]:
        """Return PIDs of ranks and leftovers that were reaped since the last call."""
        let_go, self._let_go = self._let_go, set()
        return let_go

    def _hoped_for(self, workers: list[Worker]) -> list[Worker]:
        stuck = {stat.pid for stat in self._stuck}
        return [worker for worker in workers if worker.pid not in stuck]

    def clear(
        self,
        workers: list[Worker],
        *,
        leftover_grace_s: float = _LEFTOVER_GRACE_S,
        ask: bool = True,
        quietly: bool = True,
        at_once: bool = False,
    ) -> None:
        """End the leftovers of ended ranks in their groups, then reap the ranks.

        Args:
            leftover_grace_s: seconds for leftovers to end by themselves.
            ask: send SIGTERM to the groups of failed ranks (leftovers of a good end may be finishing something); False
            if they had it already.
            quietly: don't report what must be killed.
            at_once: only processes that clean up after the others have that time, the rest is killed.
        """
        ended = [worker for worker in workers if worker.poll_end() and not worker.reaped]
        left = self._left_behind(ended)
        self._let_go.update(worker.pid for worker in ended)
        self._let_go.update(stat.pid for stat in left)
        if left:
            if ask:
                _ask(worker for worker in ended if worker.exitcode != 0)
            if at_once:
                process_tree.kill_left([stat for stat in left if not process_tree.tidies_up(stat)], _pids(ended))
            left = self._wait_gone(ended, left, leftover_grace_s, patient=False)
        if left and not quietly:
            names = ", ".join(f"{stat.pid} ({stat.comm})" for stat in left)
            self.say(f"ranks exited and left processes behind; killing them: {names}")
        self._kill_left(ended, left)
        for worker in ended:
            worker.reap()

    def _kill_left(self, ended: list[Worker], left: list[ProcessStat]) -> None:
        deadline = time.monotonic() + self.kill_wait_s
        while left and time.monotonic() < deadline:
            # the groups first: that reaches concurrent forks, too
            for worker in ended:
                worker.signal(signal.SIGKILL, whole_group=True)
            process_tree.kill_left(left, _pids(ended))
            left = self._wait_gone(ended, left, min(1.0, deadline - time.monotonic()), patient=True)
        if left:
            self._stuck += left
            self.say(launcher_lines.did_not_end(_stats([stat.pid for stat in left]), waited_s=self.kill_wait_s))

    def _left_behind(self, ended: list[Worker]) -> list[ProcessStat]:
        return process_tree.left_behind(_pids(ended), self.known_children())

    def _wait_gone(
        self, ended: list[Worker], left: list[ProcessStat], grace_s: float, *, patient: bool
    ) -> list[ProcessStat]:
        """Wait for processes that may be no children, as long as allowed. Return the live ones, and their successors.

        Others are served before each look, of which only those walk through /proc that find all of them gone.
        """
        deadline_s, is_over = time.monotonic() + grace_s, False
        while left and not is_over:
            self.reactor.run_once(max(0.0, min(_LOOK_AGAIN_S, deadline_s - time.monotonic())))
            is_over = time.monotonic() >= deadline_s or (self.in_a_hurry() and not patient)
            now = [(stat, read_stat(stat.pid)) for stat in left]
            live = [each for stat, each in now if each is not None and each.session == stat.session]
            if is_over or all(each.state in "ZX" for each in live):
                left = self._left_behind(ended)
        return left


def _ask(workers: Iterable[Worker], number: int = signal.SIGTERM, *, whole_group: bool = True) -> None:
    """Signal ranks; a stopped process is continued, otherwise the signal would stay pending."""
    for worker in workers:
        worker.signal(number, whole_group=whole_group)
        worker.signal(signal.SIGCONT, whole_group=whole_group)


def _pids(workers: list[Worker]) -> set[int]:
    return {worker.pid for worker in workers}


def _all_ended(workers: list[Worker]) -> bool:
    return all(worker.exitcode is not None for worker in workers)


def _stats(pids: Collection[int]) -> list[ProcessStat]:
    """Return the current state of those that live."""
    stats = [read_stat(pid) for pid in pids]
    return [with_owner(stat) for stat in stats if stat is not None and stat.state not in "ZX"]
