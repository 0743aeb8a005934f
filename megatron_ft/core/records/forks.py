"""Records of a launcher on how its ranks are made: forked from the script that is run ahead, or fresh interpreters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.codec import Pid, Seconds

__all__ = ["ForkFailed", "ForkServer", "FreshInterpreters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServer:
    """The process that runs the script ahead, and forks ranks.

    Args:
        state: "started", "ready", "ended", "not started", or "for something else".
        where, what: at which line the script waits, and what it was about to do there.
        took_s: until it did.
        names: of the variables that the ranks have otherwise now.
        reason: why it can't be used.
    """

    state: str = ""
    pid: Pid | None = None
    where: str = ""
    what: str = ""
    took_s: Seconds | None = None
    names: tuple[str, ...] = ()
    exit_code: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """Ranks couldn't be forked: this time they are fresh interpreters.

    Args:
        pids: of the fork server.
    """

    pids: tuple[Pid, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshInterpreters:
    """Ranks are no longer forked."""

    reason: str = ""
