"""``ft_state.json``: read with suspicion, written atomically, renamed if it is broken."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from typing import Any

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.ipc.files.atomic_write import write_whole

_MAX_CHARACTERS = 1 << 20
TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp")
"""Name of a writer's temporary file (``atomic_write``); a killed writer leaves one."""
_STALE_AFTER_S = 600.0


class BrokenStateFile(FaultToleranceError):
    """Raised for a file that was read and isn't JSON. The message says why."""


class UnreadableStateFile(FaultToleranceError):
    """Raised for a file that can't be read, and so must be left alone. The message says why."""


def read_state(path: str) -> Any | None:
    """Return the JSON document in the file; None if there is no file.

    Raises:
        UnreadableStateFile: the path is no regular file, or the file system refuses to read it.
        BrokenStateFile: the content isn't JSON. (``learning.state`` checks what it says.)
    """
    try:
        # checked first, because opening a FIFO would block for ever
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                raise UnreadableStateFile("is a directory" if stat.S_ISDIR(mode) else "is not a regular file")
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableStateFile(f"can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BrokenStateFile("is not a text file") from None
    if len(text) > _MAX_CHARACTERS:
        raise BrokenStateFile(f"has more than {_MAX_CHARACTERS} characters")
    if not text.strip():
        raise BrokenStateFile("is empty")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise BrokenStateFile("is not JSON: nested too deep") from None
    except ValueError as error:
        raise BrokenStateFile(f"is not JSON: {error}") from None
    if document is None:
        raise BrokenStateFile("holds null, not a mapping")
    return document


def write_state(path: str, document: object) -> None:
    """Replace the file. If the process is killed at any moment, the file is the old one or the new one.

    Raises:
        OSError: the file can't be written; no temporary file is left.
    """
    # whatever the umask, other users can't set the timeouts by which ranks are terminated
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n", fsync=True, mode=0o664)
    _remove_stale_temporaries(path)


def set_aside(path: str) -> str:
    """Rename the file to ``<path>.corrupt-<n>``, the first free n from 1. Return the new path.

    Raises:
        OSError: the file can't be renamed.
    """
    number = 1
    while os.path.lexists(f"{path}.corrupt-{number}"):
        number += 1
    aside = f"{path}.corrupt-{number}"
    os.rename(path, aside)
    return aside


def _remove_stale_temporaries(path: str) -> None:
    """Remove temporary files of killed writers, by their age relative to the file just written: the file server's
    clock."""
    with contextlib.suppress(OSError):  # failing to tidy up must not fail a write that has succeeded
        target = os.path.realpath(path)
        newest = os.stat(target).st_mtime
        with os.scandir(os.path.dirname(target)) as entries:
            for entry in entries:
                if TEMPORARY.fullmatch(entry.name) and newest - entry.stat().st_mtime > _STALE_AFTER_S:
                    os.unlink(entry.path)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
