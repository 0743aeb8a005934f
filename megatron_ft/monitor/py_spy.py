"""Stacks by py-spy, if it is installed, of a process that can't write them itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from megatron_ft.diagnosis.stacks import ThreadStack, parse_py_spy
from megatron_ft.link.file_queue import FileQueue

_KILLED_S = 0.1
_runs = FileQueue()


def dump(pid: int, *, nonblocking: bool, left_s: float) -> list[ThreadStack]:
    """Return the stacks of all threads within ``left_s`` seconds; empty if py-spy is missing, slow or not permitted.

    ``nonblocking``: don't stop the process while its stacks are read; frames may be wrong.
    """
    if left_s <= 0:
        return []
    # searching and loading the program reads a file system that may hang
    return _runs.call(lambda: _dump(pid, nonblocking=nonblocking, left_s=left_s), [], bound_s=left_s + 2 * _KILLED_S)


def _dump(pid: int, *, nonblocking: bool, left_s: float) -> list[ThreadStack]:
    import shutil  # these imports take up to a tenth of a monitor's start, and most ranks never hang
    import subprocess

    program = next(filter(None, (shutil.which("py-spy", path=place) for place in _places())), None)
    if program is None:
        return []
    command = [program, "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if nonblocking else [])]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return []
    assert process.stdout is not None
    with process.stdout:
        try:
            text, _ = process.communicate(timeout=left_s)
            return parse_py_spy(json.loads(text)) if process.returncode == 0 else []
        except subprocess.TimeoutExpired:
            process.kill()
            # py-spy reading a process stuck in the kernel may get stuck there too, beyond any signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
            return []
        except ValueError:
            return []


def _places() -> list[str | None]:
    """Return the search paths for py-spy: beside this Python, then PATH."""
    return [os.path.dirname(sys.executable), None]
