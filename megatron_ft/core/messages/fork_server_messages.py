"""Messages between a launcher and its fork server, which imports what the ranks' script imports, and forks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from megatron_ft.core.codec import Message, Pid, Seconds, Vocabulary

# -- from the launcher ----------------------------------------------------------------------------------------


class CheckFiles(Message, frozen=True):
    """Ask whether a file of the user has changed that was imported or read. The answer is `FilesChecked`."""

    NAME: ClassVar[str] = "check"


class Spawn(Message, frozen=True):
    """Fork a rank with these variables and the attached descriptors. The answer is `Forked` or `Failed`."""

    env: Mapping[str, str]


ToServer = CheckFiles | Spawn
TO_SERVER: Vocabulary[ToServer] = Vocabulary(ToServer)


# -- from the fork server -------------------------------------------------------------------------------------


class ModuleLeftOut(Message, frozen=True):
    """A module that was to be imported before the script can't be imported."""

    name: str
    reason: str
    NAME: ClassVar[str] = "left_out"


class ImportsReady(Message, frozen=True):
    """The imports above the line ``where`` are done, ``took_s`` after the server's start."""

    where: str
    took_s: Seconds
    NAME: ClassVar[str] = "ready"


class ImportActs(Message, frozen=True):
    """An import does what ranks can't share, so that the server ends: ``module`` does ``what``."""

    statement: str
    where: str
    what: str
    module: str
    NAME: ClassVar[str] = "acts"


class Unfit(Message, frozen=True):
    """No rank can be forked from this process, which ends."""

    reason: str


class FilesChecked(Message, frozen=True):
    """Path of a file that has changed; None without a change."""

    changed: str | None = None
    NAME: ClassVar[str] = "checked"


class Forked(Message, frozen=True):
    pid: Pid


class Failed(Message, frozen=True):
    """The server could not fork the rank, or not all ranks of simultaneous requests."""

    reason: str


FromServer = ModuleLeftOut | ImportsReady | ImportActs | Unfit | FilesChecked | Forked | Failed
FROM_SERVER: Vocabulary[FromServer] = Vocabulary(FromServer)
