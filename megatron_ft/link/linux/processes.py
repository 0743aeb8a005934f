"""Processes as the kernel shows them: pidfds, /proc, process groups. Linux only.

A process is signalled through a pidfd, or through the group of a child that isn't reaped yet: a bare number may belong
to another process by now.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_EXIT_STATUS, _START_TIME = 49, 19
"""Positions in a stat file, counted from the state."""
OWN_THREADS = "/proc/self/task"
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""False for a kernel without this option; then all of /proc is read."""


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat."""

    pid: int
    comm: str
    state: str
    parent: int
    group: int
    session: int
    is_anothers: bool = False
    """True if the process is known to belong to another user (sudo), so that it can't be signalled."""
    exitcode: int = 0
    """Exit code of a zombie, as in ``subprocess``; 0 if the process lives, or it may not be read."""


def read_stat(pid: int) -> ProcessStat | None:
    """Return what the kernel reports of a process, None if there is none.

    A process of another user that is hidden (hidepid of /proc) has only state Z, or "?" if it lives, group and session.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return _hidden_stat(pid)
    # the name may hold anything, spaces and brackets included, so it ends at the last bracket
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    comm = head.partition(b"(")[2].decode(errors="replace")
    state, exitcode = fields[0].decode(), 0
    if state == "Z" and len(fields) > _EXIT_STATUS:
        exitcode = os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS]))
    return ProcessStat(pid, comm, state, int(fields[1]), int(fields[2]), int(fields[3]), exitcode=exitcode)


def process_began_ns() -> int:
    """Return when this process was started, ns of CLOCK_MONOTONIC; now, if /proc doesn't tell."""
    now_ns = time.monotonic_ns()
    with contextlib.suppress(OSError), open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[_START_TIME])
        # its age counts time in which the host was suspended
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return max(0, now_ns - round(age_s * 1e9))
    return now_ns


def children(pid: int) -> set[int]:
    """Return the PIDs of the children of a process, zombies and adopted ones included."""
    if not _KERNEL_LISTS_CHILDREN:
        return {stat.pid for stat in all_processes() if stat.parent == pid}
    found: set[int] = set()
    unreadable = (FileNotFoundError, ProcessLookupError, PermissionError)  # ended, or hidden
    with contextlib.suppress(*unreadable):
        for task in os.listdir(f"/proc/{pid}/task"):
            # a thread may end in the meantime; its children go to another thread of the process
            with contextlib.suppress(*unreadable), open(f"/proc/{pid}/task/{task}/children") as file:
                found.update(int(child) for child in file.read().split())
    return found


def _hidden_stat(pid: int) -> ProcessStat | None:
    try:
        group, session = os.getpgid(pid), os.getsid(pid)
    except OSError:
        return None  # no such process
    parent, state = 0, "?"
    with contextlib.suppress(ChildProcessError):  # not a child of this process
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        parent, state = os.getpid(), "?" if ended is None else "Z"
    return ProcessStat(pid, "hidden", state, parent, group, session, is_anothers=True)


def all_processes() -> Iterator[ProcessStat]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            yield stat


def wait_ready(fd: int, event: int, deadline_s: float) -> bool:
    """Wait for ``event``, an error, a hang-up, or the deadline (time.monotonic). Return False at the deadline."""
    poller = select.poll()
    poller.register(fd, event)
    while True:
        left_s = deadline_s - time.monotonic()
        if poller.poll(max(0.0, left_s) * 1e3):
            return True
        if left_s <= 0:
            return False


def has_hung_up(fd: int) -> bool:
    """Return True if the other end of a pipe or a socket is closed."""
    return wait_ready(fd, 0, 0.0)  # errors and hang-ups are always reported


def is_gone(pidfd: int) -> bool:
    """Return True if the process has ended, reaped or not."""
    return wait_ready(pidfd, select.POLLIN, 0.0)


def wait_gone(pidfd: int, timeout_s: float) -> bool:
    """Wait at most ``timeout_s`` for the end of a process. Return True if it has ended."""
    return wait_ready(pidfd, select.POLLIN, time.monotonic() + timeout_s)


def is_in(pid: int, group: int) -> bool:
    """Return True if a process is in this process group, or in the session of the same number."""
    stat = read_stat(pid)
    return stat is not None and group in (stat.group, stat.session)


def send_signal(pidfd: int, number: int) -> bool:
    """Signal the process behind a pidfd. Return False if it is gone, or belongs to another user now (sudo)."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def with_owner(stat: ProcessStat) -> ProcessStat:
    """Return ``stat`` with ``is_anothers`` determined."""
    try:
        os.kill(stat.pid, 0)  # signal 0 has no effect, whichever process has the number by now
    except PermissionError:
        return stat._replace(is_anothers=True)
    except ProcessLookupError:
        pass
    return stat


def signal_main_thread(pid: int, pidfd: int, number: int) -> bool:
    """Signal the main thread of the process behind both. Return False if it is gone.

    A signal sent through a pidfd may be taken by any thread; that is done only if the main thread blocks the signal.
    Otherwise it is sent by the number, which can't belong to another process while this one lives, as checked right
    before.
    """
    import ctypes

    tgkill = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)
    if tgkill is None or number == signal.SIGKILL or is_masked(f"/proc/{pid}", number, "SigBlk") is not False:
        return send_signal(pidfd, number)
    return not is_gone(pidfd) and ctypes.CDLL(None).syscall(tgkill, pid, pid, number) == 0


def would_end_by(pid: int, number: int) -> bool:
    """Return True if the process doesn't catch, block or ignore the signal. False for a process gone or hidden."""
    return is_masked(f"/proc/{pid}", number, "SigBlk", "SigIgn", "SigCgt") is False


def is_masked(place: str, number: int, *names: str) -> bool | None:
    """Return True if any of these sets (proc(5)) of the thread at this place has the signal; None if it is gone."""
    lines = [line.partition(b":") for line in contents(f"{place}/status").split(b"\n")]
    masks = [int(mask, 16) for name, _, mask in lines if name.decode(errors="replace") in names]
    return any(mask >> (number - 1) & 1 for mask in masks) if masks else None


def carries(pid: int, marker: bytes) -> bool:
    """Return True if a process was started with ``marker`` in its environment."""
    return marker in contents(f"/proc/{pid}/environ")


def contents(path: str) -> bytes:
    """Return the content of a file in /proc; empty if its process has ended, or is another user's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def kill_matching(
    belongs: Callable[[ProcessStat], bool],
    timeout_s: float,
    listed: Callable[[], Iterable[ProcessStat]] = all_processes,
) -> list[ProcessStat]:
    """SIGKILL every listed process for which ``belongs`` is true, until none is left or the time is over. Return the
    survivors."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [stat for stat in listed() if stat.state not in "ZX" and belongs(stat)]
        if not left or time.monotonic() > deadline:
            return left
        for stat in left:
            kill_if_still(stat, belongs)
        time.sleep(0.01)


def kill_if_still(stat: ProcessStat, belongs: Callable[[ProcessStat], bool]) -> None:
    """SIGKILL a listed process if ``belongs`` still holds for it; not if no descriptor is left for a pidfd."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(stat.pid)
        try:
            # the number may have gone to another process since it was listed; the pidfd can't change any more
            again = read_stat(stat.pid)
            if again is not None and belongs(again):
                send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def thread_count() -> int:
    """Return the number of threads of this process, C libraries included. A thread that ends is given a moment."""
    for _ in range(20):
        count = len(os.listdir(OWN_THREADS))
        if count == 1:
            break
        time.sleep(0.001)
    return count
