"""Messages between a launcher and its fork server, which imports what ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ft.link.base.codec import Count, Message, Pid, Seconds, Vocabulary

FORK_SERVER_NAME = "ft_fork_server"
"""Process name of the fork server; its forks have it, too, until they become ranks."""
RUN_AHEAD_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""Variable with a server's orders, removed before it imports anything."""


class Orders(NamedTuple):
    """The script whose imports are to be shared, with its environment."""

    command: list[str]
    """Command of the ranks: this Python, "-u", and a script or module with its arguments."""
    environment: dict[str, str]
    """Environment common to all ranks."""
    preload: tuple[str, ...] = ()
    """Modules to import before those of the script, at the user's request."""
    left_out: tuple[str, ...] = ()
    """Imports that act: each rank does them itself."""


class RankSpec(NamedTuple):
    """Specification of a rank; ``stdout`` and ``stderr`` are files to write, None is the launcher's own stream."""

    local_rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: str | None
    stderr: str | None


class Spawn(Message, frozen=True):
    """Fork a rank with these variables, and the attached descriptors: go, standard output, standard error.

    ``more`` requests of the same cycle follow, and all have one answer: `Forked` or `FilesChanged`.
    """

    env: Mapping[str, str]
    more: Count = 0


TO_SERVER: Vocabulary[Spawn] = Vocabulary(Spawn)


class ImportsReady(Message, frozen=True):
    """The imports above the line ``where`` are done, ``took_s`` after the server's start."""

    where: str
    took_s: Seconds


class ImportActs(Message, frozen=True):
    """An import does what ranks can't share, so that the server ends: ``module`` does ``what``."""

    statement: str
    where: str
    what: str
    module: str


class FilesChanged(Message, frozen=True):
    """Refusal to fork: this file of the user has changed since it was imported or read."""

    path: str


class Forked(Message, frozen=True):
    pids: tuple[Pid, ...]


class Failed(Message, frozen=True):
    """The server can't import, or fork all of the ranks, and ends."""

    reason: str


FromServer = ImportsReady | ImportActs | FilesChanged | Forked | Failed
FROM_SERVER: Vocabulary[FromServer] = Vocabulary(FromServer)
