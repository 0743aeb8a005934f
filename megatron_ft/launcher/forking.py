"""Ranks forked from a server that has done their imports; fresh interpreters wherever that isn't safe."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ft.core.preload import RankCommand, differing_variables, hidden_modules, read_command
from megatron_ft.ipc.event_log import EventLog
from megatron_ft.launcher import lines
from megatron_ft.launcher.generations import Generations
from megatron_ft.launcher.learned_imports import LearnedImports
from megatron_ft.launcher.reactor import Reactor
from megatron_ft.launcher.server_process import ServerError, ServerProcess
from megatron_ft.launcher.workers import Spawner, Worker

__all__ = ["ForkingSpawner"]

_LONGEST_WAIT_S = 5.0
"""For a server that imports what the last ranks did: without it each rank does that work, at the same time."""
_LARGEST_ENVIRONMENT = 700_000
"""In bytes; beyond that a request would not be a message of ours."""


class ForkingSpawner:
    """Asks the fork server, and has another spawner for what that can't do."""

    def __init__(
        self,
        fresh: Spawner,
        first: ServerProcess | None,
        *,
        preload: Sequence[str],
        preload_timeout_s: float,
        reactor: Reactor,
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        """``first``: a server that runs already; without one a fresh one is started.

        ``preload``: names of modules that the user asked for; the first ranks wait for them, at most
        ``preload_timeout_s`` seconds for each.
        """
        self._fresh = fresh
        self._say = say
        self._log = log
        self._reactor = reactor
        self._preload = tuple(preload)
        self._preload_timeout_s = preload_timeout_s
        self._said: set[str] = set()
        self._command: RankCommand | None = None
        self._has_spawned = False
        self._generations = Generations(
            first, preload=self._preload, timeout_s=preload_timeout_s, reactor=reactor, log=log, say=say
        )
        self._learned = LearnedImports(reactor, on_pause=self._grow)

    def prepare(self, argv: Sequence[str]) -> None:
        """Look at the command of the ranks, and have imported what the user asked for."""
        command = read_command(argv, sys.executable)
        reason = command if isinstance(command, str) else _why_no_fork(command)
        if reason is None:
            assert isinstance(command, RankCommand)
            self._command = command
            self._generations.begin(_script_directory(command))
        else:
            self._use_fresh(reason)
            self._generations.close()

    def spawn(
        self,
        *,
        local_rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
    ) -> Worker:
        """See the protocol."""
        worker = self._fork(local_rank, argv, env, stdout, stderr)
        if worker is not None:
            return worker
        return self._fresh.spawn(local_rank=local_rank, argv=argv, env=env, stdout=stdout, stderr=stderr)

    def pids(self) -> set[int]:
        """Of the servers."""
        return self._generations.pids()

    def check_states(self) -> None:
        """Replace a server that somebody stopped."""
        self._generations.replace_if_stopped()

    def close(self) -> None:
        """End the servers."""
        self._learned.close()
        self._generations.close()

    def _fork(
        self, local_rank: int, argv: Sequence[str], env: Mapping[str, str], stdout: str | None, stderr: str | None
    ) -> Worker | None:
        if self._command is None:
            return None
        command = read_command(argv, sys.executable)
        if isinstance(command, str):
            self._use_fresh(command)
            return None
        server = self._server()
        if server is None:
            return None
        reason = self._why_not_from(server, command, env)
        if reason is not None:
            self._use_fresh(reason)
            return None
        request = {
            "argv": list(argv),
            "command": {"script": command.script, "is_module": command.is_module, "arguments": command.arguments},
            "cwd": os.getcwd(),
            "env": dict(env),
        }
        try:
            return self._request(server, local_rank, request, stdout, stderr)
        except ServerError as error:
            self._log.write("fork_failed", local_rank=local_rank, pid=server.pid, reason=str(error))
            return None

    def _server(self) -> ServerProcess | None:
        """The one to fork from now; waits for one that is about to be better."""
        wait_s = _LONGEST_WAIT_S
        if not self._has_spawned and self._preload:
            wait_s = self._preload_timeout_s * len(self._preload) + _LONGEST_WAIT_S
        self._has_spawned = True
        generations = self._generations
        self._reactor.run_until(lambda: not generations.is_growing, deadline_s=time.monotonic() + wait_s)
        server = generations.current
        return server if server is not None and server.is_ready else None

    def _why_not_from(self, server: ServerProcess, command: RankCommand, env: Mapping[str, str]) -> str | None:
        differing = differing_variables(server.environment, env)
        if differing:
            return f"{', '.join(differing)} of the ranks differ from the launcher's"
        if sum(len(name) + len(value) for name, value in env.items()) > _LARGEST_ENVIRONMENT:
            return "their environment is too large"
        hidden = hidden_modules(_modules_in(_script_directory(command)), server.modules)
        return f"{hidden[0]} beside the script hides a module of that name" if hidden else None

    def _request(
        self, server: ServerProcess, local_rank: int, request: Mapping[str, Any], stdout: str | None, stderr: str | None
    ) -> Worker:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(stdout, "w")).fileno() if stdout else 1
            err = stack.enter_context(open(stderr, "w")).fileno() if stderr else 2
            go_read, go_write = os.pipe()
            stack.callback(os.close, go_read)
            # whatever happens here: a child that isn't told to go ends itself when this is closed
            stack.callback(os.close, go_write)
            fds = [go_read, _standard_input(stack), out, err]
            if local_rank == 0:
                report = self._learned.begin()
                stack.callback(os.close, report)
                fds.append(report)
            pid = server.fork_rank(request, fds)
            worker = Worker(local_rank, pid, os.pidfd_open(pid))
            os.write(go_write, b"g")
        return worker

    def _grow(self) -> None:
        """The first rank has stopped importing for a while: have its modules for the next ones."""
        self._generations.grow(self._learned.modules, roots=_installed_roots())

    def _use_fresh(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._say(lines.fresh_interpreters(reason))
            self._log.write("fresh_interpreters", reason=reason)


def _standard_input(stack: contextlib.ExitStack) -> int:
    try:
        os.fstat(0)
    except OSError:
        return stack.enter_context(open(os.devnull)).fileno()
    return 0


def _script_directory(command: RankCommand) -> str:
    """What comes first in the ``sys.path`` of a rank."""
    return os.getcwd() if command.is_module else os.path.dirname(os.path.realpath(command.script))


def _why_no_fork(command: RankCommand) -> str | None:
    """A directory or an archive as script is for Python itself to make sense of."""
    if command.is_module:
        return None
    try:
        with open(command.script, "rb") as file:
            return "the script is an archive" if file.read(4) == b"PK\x03\x04" else None
    except IsADirectoryError:
        return "the script is a directory"
    except OSError:
        return None  # there is none (yet, or here): the rank says so


def _modules_in(directory: str) -> set[str]:
    """Names of modules and packages there. A directory without __init__.py hides nothing that is installed."""
    names = set()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            name, _, suffix = entry.name.partition(".")
            if suffix.endswith(("py", "so")) or os.path.exists(os.path.join(entry.path, "__init__.py")):
                names.add(name)
    return names


def _installed_roots() -> list[str]:
    import site

    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return sorted(path.rstrip(os.sep) + os.sep for path in paths if path)
