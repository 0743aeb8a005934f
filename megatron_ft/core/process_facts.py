"""What the kernel reports of a process that hangs or can't be killed. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """One thread.

    Args:
        comm: its name.
        state: as /proc has it: "R", "S", "D", "T".
        wchan: the kernel's function in which it waits; empty or "0" where that isn't known.
    """

    tid: int
    comm: str
    state: str
    wchan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process; what can't be read is empty.

    Args:
        pid: null in a file of evidence, which has it already.
        state: of its main thread; so are ``comm`` and ``wchan``.
    """

    pid: int | None = None
    state: str = ""
    comm: str = ""
    wchan: str = ""
    threads: tuple[ThreadFacts, ...] = ()
