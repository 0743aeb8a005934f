"""The limit of open files: raised in launchers and coordinators, as it was in everything else that a launcher starts.

The launcher has some descriptors for each rank, and one for each connection to a store that serves all nodes: the usual
1024 end at a thousand nodes. A program that uses select() fails beyond 1024, so ranks get what the launcher was given.
"""

from __future__ import annotations

import contextlib
import resource

__all__ = ["give_back", "give_back_to", "given_soft_limit", "take_all"]

_given: tuple[int, int] | None = None


def take_all() -> None:
    """Raise the soft limit of this process to the hard one; what can't be raised stays."""
    global _given
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _given is None and limits[0] != limits[1]:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            _given = limits


def given_soft_limit() -> int | None:
    """What it was; None if it wasn't raised."""
    return None if _given is None else _given[0]


def give_back() -> None:
    """In this process: descriptors above the limit stay open."""
    global _given
    if _given is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _given)
        _given = None


def give_back_to(pid: int) -> None:
    """In a child that has just been started, and doesn't open many before that; one that has ended is fine."""
    if _given is not None:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _given)
