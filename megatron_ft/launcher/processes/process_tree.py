"""Processes below the launcher: those it started, those it inherited, and what is left of a rank's group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable

from megatron_ft.ipc.files.file_thread import FileThread
from megatron_ft.ipc.linux import processes
from megatron_ft.ipc.linux.processes import ProcessStat, all_processes, kill_if_still, read_stat
from megatron_ft.launcher.base.event_loop import Reactor

_STOPPED_FOR_S = 0.1
_STRAYS_S = 1.0
"""One that is stuck in the kernel isn't waited for any longer."""
_READ_S = 1.0
_reads = FileThread()


def children() -> set[int]:
    """Process ids of our children, adopted ones and zombies included."""
    return processes.children(os.getpid())


def left_behind(leaders: Collection[int], known: Collection[int]) -> list[ProcessStat]:
    """Living processes of the groups and sessions of leaders that have ended and aren't reaped yet.

    When a process ends, its children become ours (we are subreaper). So without a child that we don't know
    nothing can be left, and the walk through /proc is spared.
    """
    unknown = children().difference(known, leaders)
    if not unknown:
        return []
    mine = set(leaders)
    listed = {stat.pid: stat for stat in all_processes()}
    # with hidepid=2 /proc doesn't even list what is another user's; our own children we know without it
    hidden = [stat for pid in unknown - listed.keys() if (stat := read_stat(pid)) is not None]
    return [
        stat
        for stat in (*listed.values(), *hidden)
        if stat.pid not in mine and stat.state not in "ZX" and not mine.isdisjoint((stat.group, stat.session))
    ]


def kill_left(stats: Iterable[ProcessStat], leaders: Collection[int]) -> None:
    """SIGKILL what these processes have left, if it still is theirs.

    One by one, because a signal to their groups doesn't reach what has made a group of its own in their session.
    """
    for stat in stats:
        kill_if_still(stat, lambda now: now.group in leaders or now.session in leaders)


def end_strays(leader: int, name: str, known: Callable[[], Collection[int]]) -> None:
    """Kill what a leader that isn't reaped yet has left, and our children of this name, but those that are known.

    What they leave becomes ours, and is ended, too.
    """

    def is_stray(stat: ProcessStat) -> bool:
        return stat.comm == name or leader in (stat.group, stat.session)

    deadline_s = time.monotonic() + _STRAYS_S
    while time.monotonic() < deadline_s:
        mine, is_known = children(), {leader, *known()}
        stats = [*filter(None, map(read_stat, mine - is_known)), *left_behind([leader], is_known)]
        strays = [stat for stat in stats if stat.pid not in is_known and stat.state not in "ZX" and is_stray(stat)]
        if not strays:
            return
        for stat in strays:
            kill_if_still(stat, is_stray)
        time.sleep(0.001)


def tidies_up(stat: ProcessStat) -> bool:
    """Whether it is a process that removes what others leave, shared memory say, and ends when they have ended."""
    if stat.comm == "torch_shm_manag":  # of torch_shm_manager the kernel keeps 15 characters
        return True
    # of a process that is stuck in the kernel it can't be read: that waits, for ever maybe
    return _reads.call(lambda: b"multiprocessing.resource_tracker" in _command_line(stat.pid), False, bound_s=_READ_S)


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def exit_code_unreaped(pid: int) -> int | None:
    """How a child of ours has ended, as subprocess has it (negative: by that signal); None if it lives.

    It stays a zombie, so its number and its process group can't become another's.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def is_stopped(pid: int) -> bool:
    """Whether a child of ours is stopped by a signal now."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "Tt"


def replace_if_stopped(reactor: Reactor, pid: Callable[[], int | None], replace: Callable[[], None]) -> None:
    """Replace a helper process of the launcher that was stopped (SIGSTOP): it does no work any more.

    It is checked now and a moment later: when a whole node is continued, the launcher may be first.

    Args:
        pid: the helper's process id; None if it has ended.
        replace: called if it is stopped at both times.
    """

    def stopped() -> bool:
        number = pid()
        return number is not None and is_stopped(number)

    if stopped():
        reactor.call_later(_STOPPED_FOR_S, lambda: replace() if stopped() else None)


def reap(pid: int) -> None:
    """Let a child that has ended go."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED)


class Orphans:
    """Adopted processes that have ended are let go, one by one.

    Never with ``waitpid(-1)``: that would take the end of a rank from those who wait for it. What some library
    of this process started is left to it: only what belongs to another session must be an orphan. As process 1 of a
    container this process adopts every orphan, also those of its own session (what ``docker exec`` leaves): there,
    what no process has asked for in ``LIBRARY_S`` seconds is an orphan, too.
    """

    LIBRARY_S = 5.0

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}
        """As process 1, those of our own session: since when each has been seen ended (time.monotonic)."""

    @property
    def are_awaited(self) -> bool:
        """Whether some may be let go soon, without an event: check again."""
        return bool(self._seen_s)

    def reap(self, is_known: Callable[[int], bool]) -> None:
        """Let go those that have ended and aren't known."""
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


class Children:
    """Processes that the launcher itself has started and still needs: no leftovers of a rank.

    Each part of the launcher that starts processes adds what names their ids.
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], Collection[int]]] = []

    def add(self, pids: Callable[[], Collection[int]]) -> None:
        """``pids`` is asked for the process ids each time they are needed."""
        self._sources.append(pids)

    def pids(self) -> set[int]:
        """The ids of all of them now."""
        return {pid for source in self._sources for pid in source()}
