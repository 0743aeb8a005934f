"""Launchers forked from a process that has imported torch: most of what a short launch costs is that import.

The fork takes on what a fresh ``python -m megatron_ft.launcher`` would have been given, and runs that module, whose
imports take no time. A launcher's start itself is tested with fresh ones.

What it starts for itself (monitors, coordinators, the fork server) are fresh interpreters, as they always are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["ForkedLauncher", "start"]

ROOT = Path(__file__).parents[2]
MODULE = "megatron_ft.launcher"
_NEEDED = ("megatron_ft.launcher.job", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
"""Between them they import whatever a launcher does, but for its ``__main__``."""
START_S = 60.0
_ROOM = "-" * 4000
"""In the command line of the process that forks; launchers write over it."""
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 48, 49, 50, 51
"""Fields of /proc/PID/stat, counted from 1."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_ARG_END = 15, 35, 9
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "LC_",
    "LOGLEVEL",
)


class ForkedLauncher:
    """One launcher, with what tests use of ``subprocess.Popen``."""

    def __init__(self, server: _Server, request: Mapping[str, Any], output: Sequence[int]) -> None:
        """``output``: for its standard output, and its errors."""
        self.args = request["argv"]
        self.returncode: int | None = None
        self._status_fd, status = os.pipe()
        try:
            self.pid = server.fork(request, (*output, status))
        finally:
            os.close(status)

    def __del__(self) -> None:
        os.close(self._status_fd)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status_fd], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            told = os.read(self._status_fd, 16)
            assert told, "the process that forks launchers is gone"
            self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """If it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Server:
    """The process that forks, of this process; it ends with it."""

    def __init__(self, env: Mapping[str, str], mark: str) -> None:
        """``mark``: as long as those that will be written over it."""
        self._temp_dir = tempfile.mkdtemp(prefix="ft")  # some modules make files there while they are imported
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        name, _, value = mark.partition("=")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), mark, _ROOM],
                cwd=ROOT,
                env={**env, name: value, "TMPDIR": self._temp_dir},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The process id of a new launcher."""
        with open(os.memfd_create("request"), "w+") as file:
            json.dump(request, file)
            file.flush()
            socket.send_fds(self._socket, [b"fork"], [file.fileno(), *fds])
        return int(self._socket.recv(16))

    def end(self) -> None:
        """It has nothing to tidy up but itself; a second call does nothing."""
        self._socket.close()
        self._process.wait()

    def kill(self) -> None:
        """End it at once, whatever it does; a launcher that it has just forked finds nobody to answer, and ends."""
        self._process.kill()
        self.end()
        shutil.rmtree(self._temp_dir, ignore_errors=True)


servers: dict[frozenset[tuple[str, str]], _Server] = {}


def start(request: Mapping[str, Any], *, base: Mapping[str, str], output: Sequence[int]) -> ForkedLauncher | None:
    """The launcher of that request, if it is one that may be a fork; else None.

    Args:
        request: ``argv``; ``env``; ``mark``, an entry of it that /proc is to show; ``cwd``; ``host``, a process whose
            network, host name and mounts are to be its own, or None.
        base: what ``env`` was made from. An interpreter that would start in another way has to be a fresh one.
        output: for its standard output, and its errors.
    """
    if request["argv"][:3] != [sys.executable, "-m", MODULE] or _read_at_start(request["env"]) != _read_at_start(base):
        return None
    key = _read_at_start(base)
    if key not in servers:
        name, _, value = request["mark"].partition("=")
        servers[key] = _Server(base, f"{name}={'-' * len(value)}")
    try:
        return ForkedLauncher(servers[key], request, output)
    except TimeoutError:  # the answer may still come, and would be taken for that to the next request
        servers.pop(key).kill()
        raise


def _read_at_start(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    # PYTHONPATH is followed in the fork; PYTHON_EXEC is torchrun's
    names = {name for name in env if name.startswith(_READ_AT_START)} - {"PYTHONPATH", "PYTHON_EXEC"}
    return frozenset((name, env[name]) for name in names)


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork launchers until the other end closes; returns only in such a fork, with what it is to be."""
    for name in _NEEDED:
        importlib.import_module(name)
    tempfile.tempdir = None  # each launcher has a TMPDIR of its own
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for pidfd in set(ready) - {connection}:
            pid, status_fd = running.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
                os.write(status_fd, str(code).encode())
            os.close(pidfd)
            os.close(status_fd)
        if connection in ready:
            data, fds, _, _ = socket.recv_fds(connection, 16, 4)
            if not data:
                shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
                os._exit(0)
            request_fd, *output, status_fd = fds
            pid = os.fork()
            if pid == 0:
                for target, fd in enumerate(output, 1):
                    os.dup2(fd, target)
                with open(request_fd) as file:
                    file.seek(0)
                    request: dict[str, Any] = json.load(file)
                return request
            running[os.pidfd_open(pid)] = pid, status_fd
            for fd in (request_fd, *output):
                os.close(fd)


def become(request: Mapping[str, Any], connection: socket.socket, old_mark: str) -> NoReturn:
    """Be the launcher of that request, to the end of this process."""
    os.setsid()
    if request["host"] is not None:
        _move_to(request["host"])
    os.chdir(request["cwd"])
    paths = _python_path()
    _take_on(request["argv"], request["env"], old_mark, request["mark"], connection.fileno())
    changes_path = _python_path() != paths
    connection.send(str(os.getpid()).encode())
    connection.close()
    sys.argv = ["-m", *request["argv"][3:]]
    sys.path[0] = request["cwd"]
    if changes_path:
        sys.path[1 : 1 + len(paths)] = _python_path()
        sys.path += [path for path in paths if path not in sys.path]  # which an editable install has, too
    sys.modules["__main__"] = ModuleType("__main__")
    if changes_path:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    runpy._run_module_as_main(MODULE)  # type: ignore[attr-defined]  # what `python -m` calls
    raise SystemExit(0)


def _python_path() -> list[str]:
    """Return what Python makes of PYTHONPATH in ``sys.path``."""
    return [*dict.fromkeys(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))]


def _move_to(host: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("net", "uts", "mnt"):
        with open(f"/proc/{host}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"can't move to the {name} namespace of process {host}")


def _take_on(command: Sequence[str], env: Mapping[str, str], old_mark: str, mark: str, kept: int) -> None:
    """Have the environment, descriptors and command line of a process that was started by that command.

    /proc/PID/environ shows ``mark``; of the command as much is shown as there is room for, and zeros may follow.
    """
    with open("/proc/self/stat") as file:
        fields = ["", "", "", *file.read().rpartition(")")[2].split()]
    start, end, first, last = (int(fields[at]) for at in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
    assert len(mark) == len(old_mark)
    ctypes.memmove(first + ctypes.string_at(first, last - first).index(old_mark.encode()), mark.encode(), len(mark))
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [*command]
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, os.fsencode(os.path.basename(command[0])), 0, 0, 0)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(start + max(len(text), 1)), 0, 0)


if __name__ == "__main__":
    CONNECTION = socket.socket(fileno=int(sys.argv[1]))
    become(serve(CONNECTION), CONNECTION, sys.argv[2])
