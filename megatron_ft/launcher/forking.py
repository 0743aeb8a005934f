"""Ranks forked from a server that has done their imports; fresh interpreters wherever that isn't safe."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron_ft.core.preload import RankCommand, differing_variables, hidden_modules, read_command
from megatron_ft.ipc.event_log import EventLog
from megatron_ft.ipc.installed import installed_roots
from megatron_ft.launcher import lines
from megatron_ft.launcher.generations import Generations
from megatron_ft.launcher.learned_imports import LearnedImports
from megatron_ft.launcher.reactor import Reactor
from megatron_ft.launcher.server_process import ServerError, ServerProcess
from megatron_ft.launcher.workers import RankSpec, Spawner, Worker

__all__ = ["ForkingSpawner"]

_LONGEST_WAIT_S = 5.0
"""For a server that imports what the last ranks did: without it each rank does that work, at the same time."""
_MOST_CHARACTERS = 150_000
"""Of the environment and the command line, which JSON may write with six bytes each; a message has 1 MiB."""


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
        check_stop: Callable[[], None],
        known_children: Callable[[], Collection[int]],
    ) -> None:
        """``first``: a server that runs already; without one a fresh one is started.

        ``preload``: names of modules that the user asked for; the first ranks wait for them, at most
        ``preload_timeout_s`` seconds for each. ``check_stop`` raises if the launcher was asked to stop.
        ``known_children``: of the launcher, the servers included.
        """
        self.expects_restart = True
        """Whether another cycle may follow the one whose ranks are spawned next; else no server is needed after."""
        self._fresh = fresh
        self._say = say
        self._check_stop = check_stop
        self._log = log
        self._reactor = reactor
        self._preload = tuple(preload)
        self._preload_timeout_s = preload_timeout_s
        self._said: set[str] = set()
        self._command: RankCommand | None = None
        self._has_spawned = False
        self._generations = Generations(
            first,
            preload=self._preload,
            timeout_s=preload_timeout_s,
            reactor=reactor,
            log=log,
            say=say,
            known_children=known_children,
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

    def spawn(self, specs: Sequence[RankSpec], on_spawned: Callable[[Worker], None]) -> None:
        """See the protocol."""
        left = list(specs)
        server = self._server() if self._command is not None else None
        if server is not None:
            reason = self._why_not_from(server, specs)
            if reason is None:
                left = self._fork(server, specs, on_spawned)
            else:
                self._use_fresh(reason)
        self._fresh.spawn(left, on_spawned)
        if not self.expects_restart:
            self._learned.close()
            self._generations.retire()

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

    def _server(self) -> ServerProcess | None:
        """The one to fork from now; waits for one that is about to be better."""
        wait_s = _LONGEST_WAIT_S
        if not self._has_spawned and self._preload:
            wait_s = self._preload_timeout_s * len(self._preload) + _LONGEST_WAIT_S
        self._has_spawned = True
        generations = self._generations
        deadline_s = time.monotonic() + wait_s
        while generations.is_growing and time.monotonic() < deadline_s:
            self._check_stop()
            self._reactor.run_once(deadline_s - time.monotonic())
        server = generations.current
        return server if server is not None and server.is_ready else None

    def _why_not_from(self, server: ServerProcess, specs: Sequence[RankSpec]) -> str | None:
        for spec in specs:
            command = read_command(spec.argv, sys.executable)
            if isinstance(command, str):
                return command
            differing = differing_variables(server.environment, spec.env)
            if differing:
                return f"{', '.join(differing)} of the ranks differ from the launcher's"
            characters = sum(len(name) + len(value) for name, value in spec.env.items()) + 2 * sum(map(len, spec.argv))
            if characters > _MOST_CHARACTERS:
                return "their environment or command line is too large"
        assert self._command is not None
        hidden = hidden_modules(_modules_in(_script_directory(self._command)), server.modules)
        return f"{hidden[0]} beside the script hides a module of that name" if hidden else None

    def _fork(
        self, server: ServerProcess, specs: Sequence[RankSpec], on_spawned: Callable[[Worker], None]
    ) -> list[RankSpec]:
        """Fork the ranks; returns those that could not be."""
        left = []
        with contextlib.ExitStack() as stack:
            prepared = [self._prepare(spec, stack) for spec in specs]
            answers = server.fork_ranks([(request, fds) for request, fds, _ in prepared])
            for spec, (_, _, go_fd), answer in zip(specs, prepared, answers, strict=True):
                if isinstance(answer, ServerError):
                    self._log.write("fork_failed", local_rank=spec.local_rank, pid=server.pid, reason=str(answer))
                    left.append(spec)
                    continue
                worker = Worker(spec.local_rank, answer, os.pidfd_open(answer))
                on_spawned(worker)
                os.write(go_fd, b"g")
        return left

    def _prepare(self, spec: RankSpec, stack: contextlib.ExitStack) -> tuple[dict[str, Any], list[int], int]:
        """A request, the descriptors that go with it, and the one that tells the new process to go on."""
        out, err = _output(spec.stdout, 1, stack), _output(spec.stderr, 2, stack)
        go_read, go_write = os.pipe()
        stack.callback(os.close, go_read)
        # whatever happens here: a child that isn't told to go ends itself when this is closed
        stack.callback(os.close, go_write)
        fds = [go_read, _standard_input(stack), out, err]
        if spec.local_rank == 0 and self.expects_restart:
            report = self._learned.begin()
            stack.callback(os.close, report)
            fds.append(report)
        command = read_command(spec.argv, sys.executable)
        assert isinstance(command, RankCommand)
        request = {
            "argv": list(spec.argv),
            "command": {"script": command.script, "is_module": command.is_module, "arguments": command.arguments},
            "cwd": _working_directory(),
            "env": dict(spec.env),
        }
        return request, fds, go_write

    def _grow(self) -> None:
        """The first rank has stopped importing for a while: have its modules for the next ones."""
        self._generations.grow(self._learned.modules, roots=installed_roots())

    def _use_fresh(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._say(lines.fresh_interpreters(reason))
            self._log.write("fresh_interpreters", reason=reason)


def _output(path: str | None, own: int, stack: contextlib.ExitStack) -> int:
    return own if path is None else stack.enter_context(open(path, "w")).fileno()


def _standard_input(stack: contextlib.ExitStack) -> int:
    try:
        os.fstat(0)
    except OSError:
        return stack.enter_context(open(os.devnull)).fileno()
    return 0


def _working_directory() -> str | None:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None  # it was removed; the ranks are there as we are


def _script_directory(command: RankCommand) -> str:
    """What comes first in the ``sys.path`` of a rank."""
    return _working_directory() or "" if command.is_module else os.path.dirname(os.path.realpath(command.script))


def _why_no_fork(command: RankCommand) -> str | None:
    """A directory or an archive as script is for Python itself to make sense of."""
    if command.is_module:
        return None
    if os.path.isdir(command.script):
        return "the script is a directory"
    if zipfile.is_zipfile(command.script):
        return "the script is an archive"
    return "the script is compiled" if command.script.endswith(".pyc") else None


def _modules_in(directory: str) -> set[str]:
    """Names of modules and packages there. A directory without __init__.py hides nothing that is installed."""
    names = set()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            name, _, suffix = entry.name.partition(".")
            if suffix.endswith(("py", "so")) or os.path.exists(os.path.join(entry.path, "__init__.py")):
                names.add(name)
    return names
