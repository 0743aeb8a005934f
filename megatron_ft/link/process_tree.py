"""Processes below the launcher: started, inherited, and left in ranks' groups."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable

from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux import processes
from megatron_ft.link.linux.processes import ProcessStat, all_processes, kill_if_still, kill_matching, read_stat

_STRAYS_S = 1.0
"""Longest wait; a process that is stuck in the kernel isn't waited for any longer."""
READ_S = 1.0
reads = FileQueue()


def children() -> set[int]:
    """Return the PIDs of the launcher's children, adopted ones and zombies included."""
    return processes.children(os.getpid())


def left_behind(leaders: Collection[int], known: Collection[int]) -> list[ProcessStat]:
    """Return live processes in the groups and sessions of leaders that have ended and aren't reaped yet.

    When a process ends, its children become the launcher's (it is subreaper). So without an unknown child nothing can
    be left, and the walk through /proc is skipped.
    """
    unknown = children().difference(known, leaders)
    if not unknown:
        return []
    mine = set(leaders)
    listed = {stat.pid: stat for stat in all_processes()}
    # with hidepid=2 /proc doesn't list another user's processes; the launcher's own children are known without it
    hidden = [stat for pid in unknown - listed.keys() if (stat := read_stat(pid)) is not None]
    return [
        stat
        for stat in (*listed.values(), *hidden)
        if stat.pid not in mine and stat.state not in "ZX" and not mine.isdisjoint((stat.group, stat.session))
    ]


def kill_left(stats: Iterable[ProcessStat], leaders: Collection[int]) -> None:
    """SIGKILL what these processes have left, if it is still theirs.

    One by one, because a signal to their groups doesn't reach a process that has made a group of its own in their
    session.
    """
    for stat in stats:
        kill_if_still(stat, lambda now: now.group in leaders or now.session in leaders)


def end_strays(leader: int, name: str, known: Callable[[], Collection[int]]) -> None:
    """Kill the leftovers of a leader that isn't reaped yet, and unknown children of this name.

    Their orphans become the launcher's, and are ended, too.
    """

    def listed() -> list[ProcessStat]:
        is_known = {leader, *known()}
        stats = [*filter(None, map(read_stat, children() - is_known)), *left_behind([leader], is_known)]
        return [stat for stat in stats if stat.pid not in is_known]

    kill_matching(lambda stat: stat.comm == name or leader in (stat.group, stat.session), _STRAYS_S, listed)


def tidies_up(stat: ProcessStat) -> bool:
    """Return True for a process that removes leftovers of others, such as shared memory, and ends after them."""
    if stat.comm == "torch_shm_manag":  # the kernel keeps 15 characters of torch_shm_manager
        return True
    # reading that of a process stuck in the kernel may block for ever
    command = reads.call(lambda: processes.contents(f"/proc/{stat.pid}/cmdline"), b"", bound_s=READ_S)
    return b"multiprocessing.resource_tracker" in command


def exit_code_unreaped(pid: int) -> int | None:
    """Return how a child has ended, as in ``subprocess`` (negative: by that signal); None if it lives.

    The child stays a zombie, so its PID and its process group can't be reused.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def is_stopped(pid: int) -> bool:
    """Return True if a child is stopped by a signal now."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


class Orphans:
    """Reaper of adopted processes that have ended, one by one.

    Never with ``waitpid(-1)``, which would take the end of a rank from its waiter. A child of a library of this process
    is left to the library: only a process of another session must be an orphan. As process 1 of a container this
    process adopts every orphan, also those of its own session (left by ``docker exec``): there, a zombie that no code
    has reaped in ``LIBRARY_S`` seconds is an orphan, too.
    """

    LIBRARY_S = 5.0

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}
        """Zombies of the own session, for process 1: since when each has been seen (time.monotonic)."""

    @property
    def are_awaited(self) -> bool:
        """True if some may be reaped soon, without an event: check again."""
        return bool(self._seen_s)

    def reap(self, is_known: Callable[[int], bool]) -> None:
        """Reap unknown zombies."""
        own_session, now_s = os.getsid(0), time.monotonic()
        seen_s, self._seen_s = self._seen_s, {}
        for pid in children():
            if is_known(pid):
                continue
            stat = read_stat(pid)
            if stat is None or stat.state != "Z":
                continue
            if stat.session == own_session:
                if os.getpid() != 1:
                    continue
                since_s = seen_s.get(pid, now_s)
                if now_s - since_s < self.LIBRARY_S:
                    self._seen_s[pid] = since_s
                    continue
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
