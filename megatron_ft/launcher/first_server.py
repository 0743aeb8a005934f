"""The first fork server: a fork of the launcher itself, at the moment when that has imported torch and nothing else.

One import serves the launcher and all ranks of the node. Later servers are forks of this one, or, where it died,
fresh interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from megatron_ft.ipc.processes import OWN_THREADS, thread_count
from megatron_ft.ipc.wire import Channel
from megatron_ft.launcher.server_process import SERVER_MODULE, ServerProcess, server_options

__all__ = ["fork_first_server", "omp_threads_to_set"]

_NPROC = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")


def fork_first_server(argv: Sequence[str], interrupt: Any) -> ServerProcess | None:
    """Import torch, and fork; None where this process is not one to fork, or not one that ranks should come from.

    Args:
        argv: the launcher's arguments, which nobody has checked yet.
        interrupt: the handler of SIGINT that this process was started with.
    """
    if not _is_worth_it(argv) or not _is_like_a_rank():
        return None
    threads = omp_threads_to_set(argv, os.environ)
    if threads is not None:
        # libraries read it when they are loaded, which is now; torch sets it for the ranks, and says so, later
        os.environ["OMP_NUM_THREADS"] = threads
    with _no_collections():
        import torch  # noqa: F401

    environment = dict(os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a daemon's
            stream.flush()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, interrupt)
        if launcher == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the launcher handles only as process 1
        ours.close()
        _become_server(theirs, launcher)
    if threads is not None:
        del os.environ["OMP_NUM_THREADS"]
    theirs.close()
    if thread_count() > 1:
        # the import has started one (libraries that mind forks have ended theirs by now): what that held at the
        # fork is held for ever in there
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        return None
    return ServerProcess(pid, Channel(ours), environment=environment)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """An import makes objects that stay: a tenth of its time is looking for those that don't."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def omp_threads_to_set(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What torchrun will set OMP_NUM_THREADS to for these arguments, as far as a glance tells; None: nothing.

    A wrong guess is noticed when the ranks are started, and costs the use of this server.
    """
    if "OMP_NUM_THREADS" in environ:
        return None
    count = environ.get("PET_NPROC_PER_NODE", "1")
    for position, word in enumerate(argv):
        found = _NPROC.fullmatch(word)
        if found is not None:
            count = found[1] if found[1] is not None else "".join(argv[position + 1 : position + 2])
        elif not word.startswith("-") and word.endswith(".py"):
            break  # what follows is the script's
    return None if count.strip() == "1" else "1"


def _is_worth_it(argv: Sequence[str]) -> bool:
    words = set(argv)
    if words & {"-h", "--help", "--no-python", "--no_python", "--run-path", "--run_path"}:
        return False
    given = [second for first, second in itertools.pairwise(argv) if first in ("--ft-preload", "--ft_preload")]
    given += [word.partition("=")[2] for word in argv if word.startswith(("--ft-preload=", "--ft_preload="))]
    given.append(os.environ.get("PET_FT_PRELOAD", ""))
    return "none" not in (word.strip().lower() for word in given)


def _is_like_a_rank() -> bool:
    """Whether what is forked from here is what ``python -u`` would be, and has one thread."""
    own_options = list(itertools.takewhile(lambda word: word.startswith("-") and word != "-m", sys.orig_argv[1:]))
    return (
        own_options in ([], ["-u"])
        and "torch" not in sys.modules
        and threading.current_thread() is threading.main_thread()
        and len(os.listdir(OWN_THREADS)) == 1
    )


def _become_server(connection: socket.socket, launcher_pid: int) -> NoReturn:
    """By argv, as a fresh one would: this package's floors don't let the launcher import what runs in ranks."""
    sys.argv = [SERVER_MODULE, *server_options(connection.detach(), launcher_pid, ())]
    runpy.run_module(SERVER_MODULE, run_name="__main__")
    raise AssertionError("a server, and a rank that it forks, end by themselves")
