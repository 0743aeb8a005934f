"""Facts of a hung process from /proc, each as far as it can be read.

Nothing here blocks on that process, except where a docstring says so. The memory map of a process stuck in a driver may
be locked for good, and ``cmdline``, ``environ``, ``maps``, ``smaps`` and ``auxv`` wait for that lock
(proc_pid_cmdline_read and mm_access in the kernel); ``syscall``, ``stack``, ``personality`` and ``io`` wait for a
process in the middle of an exec (exec_update_lock). ``stat``, ``status``, ``wchan`` and the list of threads take spin
locks only, ``schedstat`` none.
"""

from __future__ import annotations

import contextlib
import os

from megatron_ft.link.base.process_facts import ProcessFacts, ThreadFacts
from megatron_ft.link.linux.processes import children, contents, is_masked, read_stat

_MAX_THREADS = 256
_MAX_PROCESSES = 256
_MAX_TEXT = 4096


def process_facts(pid: int) -> ProcessFacts:
    """Return state, name, waiting channel and threads of a process, as far as they can be read."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessFacts()
    return ProcessFacts(state=stat.state, comm=stat.comm, wchan=_read(f"/proc/{pid}/wchan"), threads=_threads(pid))


def lost_processes(pid: int) -> list[tuple[int, str, int]]:
    """Return PID, name and exit code (as in ``subprocess``) of failed descendants of a process.

    Only zombies are found: the kernel forgets a child once its parent has reaped it.
    """
    stats = map(read_stat, _with_children(pid)[1:])
    return [(each.pid, each.comm, each.exitcode) for each in stats if each and each.state == "Z" and each.exitcode]


def handles(pid: int, number: int) -> bool:
    """Return True if a process catches this signal and its main thread doesn't block it."""
    return is_masked(f"/proc/{pid}", number, "SigCgt") is True and not is_masked(f"/proc/{pid}", number, "SigBlk")


def has_open(pid: int, name: str) -> bool:
    """Return True if a process has a memory file (memfd) of that name open, or if that can't be read."""
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return True
    for number in numbers:
        with contextlib.suppress(OSError):  # closed in the meantime
            if os.readlink(f"{directory}/{number}").startswith(f"/memfd:{name}"):
                return True
    return False


def has_mapped(pid: int, inode: int) -> bool:
    """Return True if a process has mapped this file, or if that can't be read.

    This waits for the lock on the process's memory map: call it with a bound of time.
    """
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any(line.split(maxsplit=5)[4] == str(inode) for line in file)
    except (OSError, IndexError, ValueError):
        return True


def blocking_threads(pid: int, number: int) -> set[int]:
    """Return the threads of a process that block this signal, as a thread does while in its handler."""
    return {tid for tid in _tids(pid) if is_masked(f"/proc/{pid}/task/{tid}", number, "SigBlk")}


def run_delays_ns(pid: int) -> dict[int, int]:
    """Return, by thread of a process, the nanoseconds it has been runnable without a CPU so far.

    A wait that isn't over yet isn't included. All are 0 where the kernel doesn't count.
    """
    return {tid: scheduled_ns(pid, tid)[1] for tid in _tids(pid)[:_MAX_THREADS]}


def scheduled_ns(pid: int, tid: int) -> tuple[int, int]:
    """Return nanoseconds a thread has run, and has been runnable without a CPU; zeros if unknown."""
    fields = _read(f"/proc/{pid}/task/{tid}/schedstat").split()
    return (int(fields[0]), int(fields[1])) if len(fields) > 1 else (0, 0)


def transferred_bytes(pid: int) -> dict[int, int]:
    """Return, by process, bytes read and written by system calls, for a process and its descendants.

    Sockets' own calls (gloo, torch's store) aren't included. This may block: see the top of this file.
    """
    found: dict[int, int] = {}
    for each in _with_children(pid):
        counters = dict(line.split(": ") for line in _read(f"/proc/{each}/io").splitlines() if ": " in line)
        if "rchar" in counters and "wchar" in counters:
            found[each] = int(counters["rchar"]) + int(counters["wchar"])
    return found


def waiting_channels(pid: int) -> dict[int, str]:
    """Return, by thread of a process and its descendants, the kernel function it waits in.

    Running threads, and those whose function is unknown, are left out.
    """
    found = {}
    for each in _with_children(pid):
        for tid in _tids(each)[:_MAX_THREADS]:
            if (channel := _read(f"/proc/{each}/task/{tid}/wchan")) not in ("", "0"):
                found[tid] = channel
    return found


def _with_children(pid: int) -> list[int]:
    """Return a process and its descendants, a few hundred at most."""
    found, seen = [pid], {pid}
    for each in found:  # the list grows in the loop
        new = children(each) - seen if len(seen) < _MAX_PROCESSES else set()
        seen |= new
        found += sorted(new)
    return found


def _threads(pid: int) -> tuple[ThreadFacts, ...]:
    found = []
    for tid in _tids(pid)[:_MAX_THREADS]:
        head, _, tail = _read(f"/proc/{pid}/task/{tid}/stat").rpartition(")")
        if tail:
            comm, wchan = head.partition("(")[2], _read(f"/proc/{pid}/task/{tid}/wchan")
            found.append(ThreadFacts(tid=tid, comm=comm, state=tail.split()[0], wchan=wchan))
    return tuple(found)


def _tids(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []  # ended in the meantime


def _read(path: str) -> str:
    return contents(path)[:_MAX_TEXT].decode(errors="replace")
