"""A rank and its monitor without a launcher, for tests: small interpreters, no torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_ft import FaultToleranceConfig, RankMonitorServer
from megatron_ft.rank.client.server import MonitorHandle

PRELUDE = """
import os, signal, sys, time
from megatron_ft import RankMonitorClient, RankMonitorClientError
def say(*words):
    print(*words, flush=True)
client = RankMonitorClient()
"""


@contextlib.contextmanager
def monitor(path: Path | str, **fields: object) -> Iterator[MonitorHandle]:
    """A monitor at ``path``, ended afterwards."""
    handle = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(**fields), str(path))
    try:
        yield handle
    finally:
        handle.terminate()
        handle.join(10)
        assert not handle.is_alive(), "the monitor didn't obey SIGTERM"


@contextlib.contextmanager
def rank(path: Path | str, script: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``script`` with a client of the monitor at ``path``; killed afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "FT_RANK_MONITOR_IPC_SOCKET": str(path), **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def expect(process: subprocess.Popen[str], start: str) -> str:
    """The rest of the next line of a rank's output, which must begin with ``start``."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(start), f"expected {start!r}, got {line!r}"
    return line[len(start) :].strip()
