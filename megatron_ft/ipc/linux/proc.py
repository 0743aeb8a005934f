"""What the kernel tells of a process that hangs, from /proc: each part as far as it may be read.

Only what can't wait for that process is read. The memory map of one that is stuck in a driver may be locked for good,
and ``cmdline``, ``environ``, ``maps``, ``smaps`` and ``auxv`` wait for that lock (proc_pid_cmdline_read and mm_access
in the kernel); ``syscall``, ``stack``, ``personality`` and ``io`` wait for one that is in the middle of an exec
(exec_update_lock). ``stat``, ``status``, ``wchan`` and the list of threads take spin locks only, ``schedstat`` none.
"""

from __future__ import annotations

import contextlib
import os

from megatron_ft.core.process_facts import ProcessFacts, ThreadFacts
from megatron_ft.ipc.linux.processes import children, is_masked, read_stat, signal_masks

_MAX_THREADS = 256
_MAX_PROCESSES = 256
_MAX_TEXT = 4096


def process_facts(pid: int) -> ProcessFacts:
    """State, name, waiting channel and threads of a process, as far as they can be read."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessFacts()
    return ProcessFacts(state=stat.state, comm=stat.comm, wchan=_read(f"/proc/{pid}/wchan"), threads=_threads(pid))


def lost_processes(pid: int) -> list[tuple[int, str, int]]:
    """Process id, name and exit code (as ``subprocess`` has it) of those a process or its children started that have
    ended badly.

    Only zombies are known: of a child that its parent has asked after, the kernel has forgotten everything.
    """
    stats = map(read_stat, _with_children(pid)[1:])
    return [(each.pid, each.comm, each.exitcode) for each in stats if each and each.state == "Z" and each.exitcode]


def handles(pid: int, number: int) -> bool:
    """Whether a process catches this signal and doesn't block it in its main thread."""
    masks, bit = signal_masks(f"/proc/{pid}"), 1 << (number - 1)
    return bool(masks and masks["SigCgt"] & bit and not masks["SigBlk"] & bit)


def has_open(pid: int, name: str) -> bool:
    """Whether a process has a memory file (memfd) of that name open; True where that can't be read."""
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return True
    for number in numbers:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{directory}/{number}").startswith(f"/memfd:{name}"):
                return True
    return False


def has_mapped(pid: int, inode: int) -> bool:
    """Whether a process has this file in its memory; True where that can't be read.

    This waits for the process's memory map: call it with a bound of time.
    """
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any(line.split(maxsplit=5)[4] == str(inode) for line in file)
    except (OSError, IndexError, ValueError):
        return True


def blocking_threads(pid: int, number: int) -> set[int]:
    """Those threads of a process that block this signal; one that is in its handler does so meanwhile."""
    return {tid for tid in _tids(pid) if is_masked(f"/proc/{pid}/task/{tid}", number, "SigBlk")}


def run_delays_ns(pid: int) -> dict[int, int]:
    """By thread of a process, how long it has been runnable and had no CPU, in its life.

    A wait that isn't over yet isn't in it. All are 0 where the kernel doesn't count that.
    """
    found = {}
    for tid in _tids(pid)[:_MAX_THREADS]:
        fields = _read(f"/proc/{pid}/task/{tid}/schedstat").split()
        if len(fields) > 1:
            found[tid] = int(fields[1])
    return found


def main_thread_ns(pid: int) -> tuple[int, int]:
    """How long the main thread of a process has run in its life, and has been runnable without a CPU; 0: not known."""
    fields = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return (int(fields[0]), int(fields[1])) if len(fields) > 1 else (0, 0)


def transferred_bytes(pid: int) -> dict[int, int]:
    """By process, of this one and those it and its children started: what it has read and written by system calls.

    What goes through sockets' own calls (gloo, torch's store) isn't in it. This may wait: see the top of this file.
    """
    found: dict[int, int] = {}
    for each in _with_children(pid):
        counters = dict(line.split(": ") for line in _read(f"/proc/{each}/io").splitlines() if ": " in line)
        if "rchar" in counters and "wchar" in counters:
            found[each] = int(counters["rchar"]) + int(counters["wchar"])
    return found


def waiting_channels(pid: int) -> dict[int, str]:
    """By thread, of this process and those it and its children started: the kernel's function in which it waits.

    Threads that run, and those of which the kernel doesn't tell, are left out.
    """
    found = {}
    for each in _with_children(pid):
        for tid in _tids(each)[:_MAX_THREADS]:
            if (channel := _read(f"/proc/{each}/task/{tid}/wchan")) not in ("", "0"):
                found[tid] = channel
    return found


def _with_children(pid: int) -> list[int]:
    """A process, those that it has started, and theirs; not more than some hundred."""
    found, seen = [pid], {pid}
    for each in found:  # it grows meanwhile
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
        return []  # gone meanwhile


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TEXT).decode(errors="replace")
    except OSError:
        return ""  # gone meanwhile, or not ours to read
