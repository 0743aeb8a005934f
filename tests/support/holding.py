"""A process that SIGKILL doesn't end: a tracer has it stop where it would end, and no signal moves it from there.

As one in uninterruptible sleep it stays what it is, with its memory and all it holds, until somebody lets it go.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

__all__ = ["held"]

_TRACER = """
import ctypes, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, TRACE_EXIT = 0x4206, 0x40
for pid in sys.argv[1:]:
    if ptrace(SEIZE, int(pid), None, TRACE_EXIT):
        sys.exit(f"process {pid} can't be traced: errno {ctypes.get_errno()}")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(*pids: int) -> Iterator[None]:
    """None of them can be ended meanwhile; afterwards those that were killed end. Skips where that isn't possible."""
    command = [sys.executable, "-S", "-c", _TRACER, *map(str, pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout is not None
            if tracer.stdout.readline() != b"held\n":
                assert tracer.stderr is not None
                pytest.skip(tracer.stderr.read().decode().strip())
            yield
        finally:
            tracer.kill()  # what it traces goes on where it stopped
