"""Facts of the kernel, and of a device's driver, about a process that hangs or can't be killed. Pure."""

from __future__ import annotations

from megatron_ft.link.base.codec import Fact, Int


class ThreadFacts(Fact, frozen=True, kw_only=True):
    """One thread.

    Args:
        comm: name of the thread.
        state: as in /proc: "R", "S", "D", "T".
        wchan: kernel function in which it waits; empty or "0" if unknown.
    """

    tid: Int
    comm: str
    state: str
    wchan: str


class ProcessFacts(Fact, frozen=True, kw_only=True):
    """One process; unreadable facts are empty.

    Args:
        pid: null in a file of evidence, which has it already.
        state: of its main thread, like ``comm`` and ``wchan``.
    """

    pid: Int | None = None
    state: str = ""
    comm: str = ""
    wchan: str = ""
    threads: tuple[ThreadFacts, ...] = ()


class Holding(Fact, frozen=True):
    """Memory of one process on one device; ``used_bytes`` is None where the driver doesn't say."""

    device: Int
    pid: Int
    used_bytes: Int | None = None
