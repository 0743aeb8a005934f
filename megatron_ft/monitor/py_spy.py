"""py-spy, where it is installed: it reads the stacks of a process that can't write them itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from megatron_ft.core.stack_dump import ThreadStack, parse_py_spy

__all__ = ["dump"]


def dump(pid: int, *, nonblocking: bool, left_s: float) -> list[ThreadStack]:
    """The stacks of all threads, in ``left_s`` seconds at most; empty where py-spy is missing, slow or not allowed.

    ``nonblocking``: don't stop the process while it is read, so that a frame may be a wrong one.
    """
    program = next(filter(None, (shutil.which("py-spy", path=place) for place in _places())), None)
    if program is None or left_s <= 0:
        return []
    command = [program, "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if nonblocking else [])]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=left_s,
            check=True,
        )
        return parse_py_spy(json.loads(result.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _places() -> list[str | None]:
    """Where it is looked for: beside this Python, then where everybody looks."""
    return [os.path.dirname(sys.executable), None]
