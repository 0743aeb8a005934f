"""``ft_state.json``: read with suspicion, written atomically, left alone if it can't be used."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import msgspec

from megatron_ft.errors import ConfigError
from megatron_ft.learning.timeouts import StateFile, parse
from megatron_ft.link.files.atomic_write import write_whole

_MOST_BYTES = 1 << 20


def carry_out(of: StateFile) -> StateFile:
    """Read the file, if there is one, or write it, creating its directory if needed.

    If the process is killed at any moment, the file is the old one or the new one.
    """
    path = of.path
    if of.document is not None:
        text = json.dumps(of.document, indent=2, allow_nan=False) + "\n"
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            # whatever the umask, other users can't set the timeouts by which ranks are terminated
            write_whole(path, text, fsync=True, mode=0o664)
        except OSError as error:
            return replace(of, problem=f"learned timeouts can't be written to {path}: {error.strerror or error}")
        return of
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would block for ever
            raise ConfigError("is not a regular file")
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"has more than {_MOST_BYTES} bytes")
        return replace(of, state=parse(msgspec.json.decode(content)))
    except FileNotFoundError:
        return of
    except OSError as error:
        why = f"can't be read: {error.strerror}"
    except ConfigError as error:
        why = str(error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = f"is not JSON: {error}"
    return replace(of, problem=f"{path} {why}: leaving it alone, timeouts learned in this run are not written")
