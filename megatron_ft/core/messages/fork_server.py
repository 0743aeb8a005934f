"""Messages between a launcher and its fork server, which runs the ranks' script ahead, and forks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.core.codec import Pid, Seconds, Vocabulary

# -- from the launcher ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckFiles:
    """Ask whether a file has changed that the script has read or run. The answer is `FilesChecked`."""

    NAME: ClassVar[str] = "check"


@dataclass(frozen=True, slots=True)
class Spawn:
    """Fork a rank with these variables and the attached descriptors. The answer is `Forked` or `Failed`."""

    env: Mapping[str, str]


ToServer = CheckFiles | Spawn
TO_SERVER: Vocabulary[ToServer] = Vocabulary(ToServer)


# -- from the fork server -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleLeftOut:
    """A module that was to be imported before the script can't be imported."""

    name: str
    reason: str
    NAME: ClassVar[str] = "left_out"


@dataclass(frozen=True, slots=True)
class ScriptReady:
    """The script waits at line ``where``, ``took_s`` after its start, about to do ``what``."""

    where: str
    what: str
    took_s: Seconds
    NAME: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class Unfit:
    """No rank can be forked from this process, which ends. ``where`` and ``what``: as in `Ready`, if known."""

    reason: str
    where: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True)
class FilesChecked:
    """Path of a file that has changed; None without a change."""

    changed: str | None = None
    NAME: ClassVar[str] = "checked"


@dataclass(frozen=True, slots=True)
class Forked:
    pid: Pid


@dataclass(frozen=True, slots=True)
class Failed:
    """The server could not fork the rank, or not all ranks of simultaneous requests."""

    reason: str


FromServer = ModuleLeftOut | ScriptReady | Unfit | FilesChecked | Forked | Failed
FROM_SERVER: Vocabulary[FromServer] = Vocabulary(FromServer)
