"""Termination of ranks with their process groups: a signal, a grace in seconds, SIGKILL. Stopped ones are continued."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.processes.worker import Worker
from megatron_ft.link import process_tree
from megatron_ft.link.linux.processes import ProcessStat, read_stat, with_owner
from megatron_ft.link.reactor import Reactor

KILL_WAIT_S = 10.0
"""Seconds for a process to end by SIGKILL (a large one takes seconds) before it is given up."""
_LEFTOVER_GRACE_S = 1.0
"""Seconds for a rank's leftovers to end by themselves, such as a resource tracker that removes shared memory."""
_LOOK_AGAIN_S = 0.01


class Termination:
    """Terminates groups of ranks; everything else is served meanwhile."""

    def __init__(
        self,
        reactor: Reactor,
        *,
        known_children: Callable[[], Collection[int]],
        in_a_hurry: Callable[[], bool],
        say: Callable[[str], None],
        kill_wait_s: float = KILL_WAIT_S,
    ) -> None:
        """``known_children`` are no leftovers; ``in_a_hurry``: no process is to be waited for any more."""
        self._reactor = reactor
        self._known_children = known_children
        self._in_a_hurry = in_a_hurry
        self._say = say
        self._kill_wait_s = kill_wait_s
        self._given_up: set[int] = set()
        """Ranks that survived SIGKILL: not waited for again."""
        self._left: list[ProcessStat] = []
        """Processes of rank process groups that survived SIGKILL."""
        self._let_go: set[int] = set()

    def end(self, workers: list[Worker], number: int, grace_s: float) -> None:
        """Signal live ranks, wait, SIGKILL the remaining ones, clear their groups, and reap them.

        The grace is one for all of them, by the clock: the user's time for a cycle to end, not extended by waits for a
        CPU, unlike that of `core.escalation`, which ends one hung rank. With a grace below a second, leftovers get no
        more time than the ranks.
        """
        is_quick = grace_s < _LEFTOVER_GRACE_S
        self.ask(workers, number, whole_group=True)
        if is_quick:
            _ask(worker for worker in workers if worker.poll_end())
        self.wait(workers, grace_s)
        self.kill(workers, with_leftovers=is_quick)
        self.clear(workers, ask=not is_quick, at_once=is_quick)

    def ask(self, workers: list[Worker], number: int, *, whole_group: bool) -> None:
        """Signal live ranks."""
        _ask((worker for worker in workers if not worker.poll_end()), number, whole_group=whole_group)

    def wait(self, workers: list[Worker], grace_s: float) -> None:
        """Wait until all have ended, the grace is over, or ``in_a_hurry`` holds."""
        hoped_for = self._hoped_for(workers)
        self._reactor.run_until(
            lambda: self._in_a_hurry() or _all_ended(hoped_for), deadline_s=time.monotonic() + grace_s
        )

    def kill(self, workers: list[Worker], *, with_leftovers: bool = False) -> None:
        """SIGKILL the groups of live ranks; ``with_leftovers``: also what ended ranks have left, to end meanwhile."""
        stubborn = [worker for worker in workers if not worker.poll_end()]
        for worker in stubborn:
            worker.signal(signal.SIGKILL, whole_group=True)
        if with_leftovers:
            ended = [worker for worker in workers if worker.exitcode is not None and not worker.reaped]
            self._kill_at_once(ended, self._left_behind(ended))
        hoped_for = self._hoped_for(stubborn)
        self._reactor.run_until(lambda: _all_ended(hoped_for), deadline_s=time.monotonic() + self._kill_wait_s)
        stuck = [worker.pid for worker in hoped_for if not worker.poll_end()]
        if stuck:
            self._given_up.update(stuck)
            self._say(launcher_lines.did_not_end(_stats(stuck), waited_s=self._kill_wait_s))

    def still_there(self, workers: Collection[Worker]) -> list[ProcessStat]:
        """Return live processes of these ranks and their groups that could not be ended; reap those that have ended."""
        if self._given_up or self._left:
            self.clear([worker for worker in workers if not worker.reaped])
            self._given_up.intersection_update(worker.pid for worker in workers if not worker.reaped)
        now = _stats([*self._given_up, *(stat.pid for stat in self._left)])
        before = {stat.pid: stat.session for stat in self._left}
        self._left = [stat for stat in now if before.get(stat.pid) == stat.session]
        return [stat for stat in now if stat.pid in self._given_up or stat in self._left]

    def take_let_go(self) -> set[int]:
        """Return PIDs of ranks and leftovers that were reaped since the last call."""
        let_go, self._let_go = self._let_go, set()
        return let_go

    def _hoped_for(self, workers: list[Worker]) -> list[Worker]:
        return [worker for worker in workers if worker.pid not in self._given_up]

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
                self._kill_at_once(ended, left)
            left = self._wait_gone(ended, left, leftover_grace_s, patient=False)
        if left and not quietly:
            names = ", ".join(f"{stat.pid} ({stat.comm})" for stat in left)
            self._say(f"ranks exited and left processes behind; killing them: {names}")
        self._kill_left(ended, left)
        for worker in ended:
            worker.reap()

    def _kill_at_once(self, ended: list[Worker], left: list[ProcessStat]) -> None:
        """SIGKILL what these ranks have left, but for processes that clean up after the others."""
        process_tree.kill_left([stat for stat in left if not process_tree.tidies_up(stat)], _pids(ended))

    def _kill_left(self, ended: list[Worker], left: list[ProcessStat]) -> None:
        deadline = time.monotonic() + self._kill_wait_s
        while left and time.monotonic() < deadline:
            # the groups first: that reaches concurrent forks, too
            for worker in ended:
                worker.signal(signal.SIGKILL, whole_group=True)
            process_tree.kill_left(left, _pids(ended))
            left = self._wait_gone(ended, left, min(1.0, deadline - time.monotonic()), patient=True)
        if left:
            self._left += left
            self._say(launcher_lines.did_not_end(_stats([stat.pid for stat in left]), waited_s=self._kill_wait_s))

    def _left_behind(self, ended: list[Worker]) -> list[ProcessStat]:
        return process_tree.left_behind(_pids(ended), self._known_children())

    def _wait_gone(
        self, ended: list[Worker], left: list[ProcessStat], grace_s: float, *, patient: bool
    ) -> list[ProcessStat]:
        """Wait for processes that aren't children, as long as allowed. Return the live ones."""
        deadline = time.monotonic() + grace_s
        while left:
            in_time = self._await(left, deadline, patient=patient)
            left = self._left_behind(ended)
            if not in_time or (self._in_a_hurry() and not patient):
                break
        return left

    def _await(self, stats: list[ProcessStat], deadline: float, *, patient: bool) -> bool:
        """Wait for all of them. Return False at the deadline (time.monotonic)."""
        waiting = set(open_pidfds(stats))
        if not waiting:  # they have just ended, or no descriptor is left to wait with
            soon_s = min(deadline, time.monotonic() + _LOOK_AGAIN_S)
            self._reactor.run_until(self._in_a_hurry, deadline_s=soon_s)
            return time.monotonic() < deadline
        for pidfd in waiting.copy():
            self._reactor.watch(pidfd, functools.partial(self._gone, pidfd, waiting))
        try:
            return self._reactor.run_until(
                lambda: not waiting or (self._in_a_hurry() and not patient), deadline_s=deadline
            )
        finally:
            for pidfd in waiting.copy():
                self._gone(pidfd, waiting)

    def _gone(self, pidfd: int, waiting: set[int]) -> None:
        self._reactor.unwatch(pidfd)
        os.close(pidfd)
        waiting.discard(pidfd)


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


def open_pidfds(stats: list[ProcessStat]) -> list[int]:
    pidfds = []
    for stat in stats:
        with contextlib.suppress(OSError):
            pidfds.append(os.pidfd_open(stat.pid))
    return pidfds
