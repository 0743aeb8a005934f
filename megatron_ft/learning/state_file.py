"""``ft_state.json``: read with suspicion, written atomically, renamed if it is broken."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from megatron_ft.errors import ConfigError
from megatron_ft.learning.state import LearnedState, StateFile, StateFileDone, UnusableStateError, parse
from megatron_ft.link.files.atomic_write import write_whole

_MOST_BYTES = 1 << 20


def read_state(path: str) -> LearnedState | None:
    """Return what the file holds; None if there is no file.

    Raises:
        UnusableStateError: the path is no regular file, the file system refuses to read it, or a newer
            version wrote it.
        ConfigError: the file was read, and is no state.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would block for ever
                raise UnusableStateError("is not a regular file")
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableStateError(f"can't be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"has more than {_MOST_BYTES} bytes")
    try:
        return parse(msgspec.json.decode(content))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}") from None


def write_state(path: str, document: Mapping[str, Any]) -> None:
    """Replace the file. If the process is killed at any moment, the file is the old one or the new one.

    Raises:
        OSError: the file can't be written; no temporary file is left.
    """
    # whatever the umask, other users can't set the timeouts by which ranks are terminated
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n", fsync=True, mode=0o664)


def carry_out(of: StateFile) -> StateFileDone:
    """Read the file, or write it with the time, creating its directory if needed.

    A file that was read and is no state is renamed to ``<path>.corrupt-<n>``, if wanted.
    """
    path = of.path
    if of.document is not None:
        at = datetime.now(timezone.utc)
        times = {"written_at_unix_s": at.timestamp(), "written_at_utc": at.isoformat(timespec="seconds")}
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            write_state(path, {**of.document, **times})
        except OSError as error:
            text = f"learned timeouts can't be written to {path}: {error.strerror or error}"
            return StateFileDone(of, problem=text)
        return StateFileDone(of)
    try:
        return StateFileDone(of, read_state(path))
    except UnusableStateError as error:
        return StateFileDone(of, None, f"{path} {error}: leaving it alone", may_write=False)
    except ConfigError as error:
        if not of.sets_aside:
            return StateFileDone(of, None, f"{path} {error}: leaving it alone")
        numbers = (number for number in itertools.count(1) if not os.path.lexists(f"{path}.corrupt-{number}"))
        aside = f"{path}.corrupt-{next(numbers)}"
        try:
            os.rename(path, aside)
        except OSError as refused:
            text = f"{path} {error}, and can't be moved away ({refused.strerror})"
            return StateFileDone(of, None, text, may_write=False)
        return StateFileDone(of, None, f"{path} {error}: moved to {aside}")
