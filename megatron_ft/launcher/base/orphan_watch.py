"""The launcher's prerequisites: the Slurm step it runs in, and readers of its output.

A launcher whose slurmstepd has died belongs to no job any more. Ranks that write to the launcher's output fail at their
next print once it has no reader. No restart helps in either case. A stream to which no rank writes may lose its reader:
the launcher's own lines are in the event log, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection

from megatron_ft.link.linux.processes import has_hung_up, read_stat
from megatron_ft.link.reactor import Priority, Reactor

STEP_DAEMON = "slurmstepd"
"""Process between a step's tasks and Slurm, on each node."""
_MOST_ANCESTORS = 32
_STREAMS = {1: "standard output", 2: "standard error"}


class OrphanWatch:
    """Watches both for one launcher. ``on_orphaned`` is called, once or several times, with what is missing."""

    def __init__(
        self, reactor: Reactor, on_orphaned: Callable[[str], None], rank_streams: Collection[int] = (1, 2)
    ) -> None:
        """``rank_streams``: descriptors of the launcher's output to which ranks write, 1 and 2 at most."""
        self._on_orphaned = on_orphaned
        self._reactor = reactor
        self._streams = {fd: name for fd, name in _STREAMS.items() if fd in rank_streams and has_reader(fd)}
        self._is_orphaned = False
        self._pidfd = _step_daemon()
        if self._pidfd is not None:
            reactor.watch(self._pidfd, self._orphaned, Priority.SIGNAL)

    def check(self) -> None:
        """Check both: each second, and before an exit of a rank is handled."""
        if self._is_orphaned:
            self._on_orphaned(f"{STEP_DAEMON}, an ancestor of this launcher, has exited")
        for fd, name in self._streams.items():
            if not has_reader(fd):
                self._on_orphaned(f"no process reads the {name} of this launcher any more")
                return

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            self._reactor.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _orphaned(self) -> None:
        self.close()
        self._is_orphaned = True
        self.check()


def has_reader(fd: int) -> bool | None:
    """Return True for a pipe or a socket whose other end is open, False where a write would fail because it is closed.

    None for what has no other end: files and terminals.
    """
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return None
    return not has_hung_up(fd) if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def _step_daemon() -> int | None:
    """Return a pidfd of the nearest slurmstepd above; None without one, or in a container that hides it."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        facts = read_stat(pid) if pid > 1 else None
        if facts is None:
            return None
        if facts.comm == STEP_DAEMON:
            with contextlib.suppress(OSError):
                return os.pidfd_open(pid)
            return None
        pid = facts.parent
    return None
