"""Launchers forked from a process that has imported torch: most of what a short launch costs is that import.

The fork takes on what a fresh ``python -m megatron_ft.launcher`` would have been given, and runs that module. It finds
neither torch nor anything of ours in ``sys.modules``, as a fresh one: its own imports only take no time. A launcher's
start itself is tested with fresh ones.

Its monitors and coordinators are such forks, too, of the launcher. So is, where that is asked for, the first process
that runs a script ahead, before the launcher has imported anything. What it can share is tested with fresh ones.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support import forked_processes

__all__ = ["ForkedLauncher", "end", "start"]

ROOT = Path(__file__).parents[2]
MODULE = "megatron_ft.launcher"
_NEEDED = (
    "megatron_ft.launcher.job",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    *(f"{package}.__main__" for package in forked_processes.PACKAGES),
)
"""Between them they import whatever a launcher does, but for its ``__main__``, and what it starts for itself."""
_READ_ANEW = ("megatron_ft", MODULE)
"""Packages that runpy looks into, and that hold nothing but their modules."""
START_S = 60.0
_ROOM = "-" * 4000
"""In the command line of the process that forks; launchers, and then their fork servers, write over it."""
_ENV_START, _ENV_END = 50, 51
"""Fields of /proc/PID/stat, counted from 1."""
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

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


class _Server:
    """The process that forks, of this process; it ends with it."""

    def __init__(self, env: Mapping[str, str], mark: str, imports: Sequence[str]) -> None:
        """``mark``: as long as those that will be written over it. ``imports``: modules besides torch."""
        self._temp_dir = tempfile.mkdtemp(prefix="ft")  # some modules make files there while they are imported
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_S)
        name, _, value = mark.partition("=")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), mark, ",".join(imports), _ROOM],
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


servers: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], _Server] = {}


def start(
    request: Mapping[str, Any], imports: Sequence[str], *, base: Mapping[str, str], output: Sequence[int]
) -> ForkedLauncher | None:
    """The launcher of that request, if it is one that may be a fork; else None.

    Args:
        request: ``argv``; ``env``; ``mark``, an entry of it that /proc is to show; ``cwd``; ``host``, a process whose
            network, host name and mounts are to be its own, or None; ``ahead``: the script runs ahead in a fork, too.
        imports: modules that ranks would import, each; the launcher has imported them once for all, as if it had been
            asked to by ``--ft-preload``.
        base: what ``env`` was made from. An interpreter that would start in another way has to be a fresh one.
        output: for its standard output, and its errors.
    """
    if request["argv"][:3] != [sys.executable, "-m", MODULE] or _read_at_start(request["env"]) != _read_at_start(base):
        return None
    key = tuple(imports), _read_at_start(base)
    if key not in servers:
        name, _, value = request["mark"].partition("=")
        servers[key] = _Server(base, f"{name}={'-' * len(value)}", imports)
    try:
        return ForkedLauncher(servers[key], request, output)
    except TimeoutError:  # the answer may still come, and would be taken for that to the next request
        servers.pop(key).kill()
        raise


def end(imports: Sequence[str]) -> None:
    """Let go of the processes that have imported these."""
    for key in [key for key in servers if key[0] == tuple(imports)]:
        servers.pop(key).end()


def _read_at_start(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    # PYTHONPATH is followed in the fork; PYTHON_EXEC is torchrun's
    names = {name for name in env if name.startswith(_READ_AT_START)} - {"PYTHONPATH", "PYTHON_EXEC"}
    return frozenset((name, env[name]) for name in names)


def serve(connection: socket.socket, imports: Sequence[str]) -> tuple[dict[str, Any], _Hidden]:
    """Fork launchers until the other end closes; returns only in such a fork, with what it is to be and to import."""
    importlib.import_module("torch")
    known = {*sys.modules} - {"torch"}
    with _noting_imports() as requested:
        for name in _NEEDED:
            importlib.import_module(name)
    hidden = _Hidden({name: sys.modules[name] for name in sys.modules.keys() - known - {*_READ_ANEW}}, requested)
    for name in imports:
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
                return request, hidden
            running[os.pidfd_open(pid)] = pid, status_fd
            for fd in (request_fd, *output):
                os.close(fd)


def become(request: Mapping[str, Any], hidden: _Hidden, connection: socket.socket, old_mark: str) -> NoReturn:
    """Be the launcher of that request, to the end of this process."""
    os.setsid()
    if request["host"] is not None:
        _move_to(request["host"])
    os.chdir(request["cwd"])
    paths, place = _python_path(), forked_processes.room()
    _write_over(old_mark, request["mark"])
    forked_processes.take_on(request["argv"], request["env"], place, [connection.fileno()])
    changes_path = _python_path() != paths
    connection.send(str(os.getpid()).encode())
    connection.close()
    sys.argv = ["-m", *request["argv"][3:]]
    sys.path[0] = request["cwd"]
    if changes_path:
        sys.path[1 : 1 + len(paths)] = _python_path()
        sys.path += [path for path in paths if path not in sys.path]  # which an editable install has, too
    for name in [
        name for name in sys.modules if name in hidden.modules or name.partition(".")[0] in ("megatron_ft", "tests")
    ]:
        del sys.modules[name]
    sys.meta_path.insert(0, hidden)  # type: ignore[arg-type]
    sys.modules["__main__"] = ModuleType("__main__")
    if changes_path:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    known = {*sys.modules} if request["ahead"] else None
    subprocess.Popen = forked_processes.popen(place, known)  # type: ignore[misc]
    try:
        runpy._run_module_as_main(MODULE)  # type: ignore[attr-defined]  # what `python -m` calls
    except forked_processes.RunsAhead as made:
        ahead = made  # run outside of the handling of an exception
    else:
        raise SystemExit(0)
    ahead.run()


def _python_path() -> list[str]:
    """Return what Python makes of PYTHONPATH in ``sys.path``."""
    return [*dict.fromkeys(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))]


def _move_to(host: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("net", "uts", "mnt"):
        with open(f"/proc/{host}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"can't move to the {name} namespace of process {host}")


class _Hidden:
    """Finds modules where they are, imported already; and with each those that it asks for itself."""

    def __init__(self, modules: Mapping[str, ModuleType], requested: Mapping[str, Sequence[str]]) -> None:
        self.modules = modules
        self._requested = requested

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.modules else None  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self.modules[module.__name__]
        for name in self._requested.get(module.__name__, ()):
            if name in self.modules:
                importlib.import_module(name)


@contextlib.contextmanager
def _noting_imports() -> Iterator[Mapping[str, Sequence[str]]]:
    """By the name of a module, what it has asked for: modules, and names in them, which may be modules."""
    requested: dict[str, list[str]] = {}
    real = builtins.__import__

    def noting(name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> ModuleType:
        found = real(name, namespace, local, names, level)
        by = namespace or {}
        base = importlib.util.resolve_name("." * level + name, by["__package__"]) if level else name
        requested.setdefault(by.get("__name__", ""), []).extend([base, *(f"{base}.{word}" for word in names or ())])
        return found

    builtins.__import__ = noting
    try:
        yield requested
    finally:
        builtins.__import__ = real


def _write_over(old_mark: str, mark: str) -> None:
    """Let /proc/PID/environ show ``mark``, as of a process that was started with it."""
    with open("/proc/self/stat") as file:
        fields = ["", "", "", *file.read().rpartition(")")[2].split()]
    first, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    assert len(mark) == len(old_mark)
    ctypes.memmove(first + ctypes.string_at(first, end - first).index(old_mark.encode()), mark.encode(), len(mark))


if __name__ == "__main__":
    CONNECTION = socket.socket(fileno=int(sys.argv[1]))
    become(*serve(CONNECTION, list(filter(None, sys.argv[3].split(",")))), CONNECTION, sys.argv[2])
