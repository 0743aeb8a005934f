"""Scripts that import Megatron, run in forks of one process that has imported it: most of their time is the import.

What a fork can't be told from a fresh interpreter by is tested elsewhere; here it only has to compute the same.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

__all__ = ["ForkedScript", "context", "server_pids", "start_server"]

_IMPORTS = "tests.support.megatron_imports"


class ForkedScript:
    """One run of a script, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, script: Path, args: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self._process: ForkServerProcess = context().Process(
            target=_run, args=(str(script), [str(script), *args], dict(env), str(output))
        )
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self) -> int | None:
        """Until it has ended."""
        self._process.join()
        return self._process.exitcode


def context() -> ForkServerContext:
    """With Megatron imported in its server, which ends with this process."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([_IMPORTS])
    return made


def start_server() -> None:
    """Start the process that forks, with the environment of this moment."""
    context()
    forkserver.ensure_running()


def server_pids() -> set[int | None]:
    """Of the process that forks, and of the one that cleans up after it; they serve until this process ends."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


def _run(script: str, argv: list[str], env: dict[str, str], output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
