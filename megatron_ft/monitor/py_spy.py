"""py-spy, where it is installed: it reads the stacks of a process that can't write them itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from megatron_ft.core.diagnosis.stacks import ThreadStack, parse_py_spy
from megatron_ft.ipc.files.file_thread import FileThread

_KILLED_S = 0.1
_runs = FileThread()


def dump(pid: int, *, nonblocking: bool, left_s: float) -> list[ThreadStack]:
    """The stacks of all threads, in ``left_s`` seconds at most; empty where py-spy is missing, slow or not allowed.

    ``nonblocking``: don't stop the process while it is read, so that a frame may be a wrong one.
    """
    if left_s <= 0:
        return []
    # the program is searched for and loaded from a file system, which may not answer either
    return _runs.call(lambda: _dump(pid, nonblocking=nonblocking, left_s=left_s), [], bound_s=left_s + 2 * _KILLED_S)


def _dump(pid: int, *, nonblocking: bool, left_s: float) -> list[ThreadStack]:
    import shutil  # with what they import as long as a tenth of a monitor's start, and most ranks never hang
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
            # reading a process that is stuck in the kernel may get it stuck there, too, where no signal ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
            return []
        except ValueError:
            return []


def _places() -> list[str | None]:
    """Where it is searched for: beside this Python, then in PATH."""
    return [os.path.dirname(sys.executable), None]
