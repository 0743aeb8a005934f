"""Ranks forked from their own script, which a process runs ahead, or else fresh interpreters."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.facts.launcher import ForkFailed, ForkServer, FreshInterpreters
from megatron_ft.core.messages.fork_server import ModuleLeftOut, ScriptReady
from megatron_ft.core.run_ahead import Ahead, is_set_for_ranks, shared_environment, without_ranks
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.wire import close_fds
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.processes.process_tree import replace_if_stopped
from megatron_ft.launcher.processes.worker import RankSpec, Spawner, Worker, WorkerCallback
from megatron_ft.launcher.spawn.fork_server import ServerError, ServerProcess, why_fresh
from megatron_ft.link.reactor import Reactor

_MOST_DEATHS = 5
"""Number of dead servers after which no other is started."""

FORK_POINT_S = 60.0
"""Longest time that a script may run ahead without reaching a fork point."""


@dataclass(kw_only=True)
class ForkingSpawner:
    """Spawner with one fork server at a time, and another spawner as fallback."""

    fresh: Spawner
    server: ServerProcess | None
    """Initially one that is already running; another is started if it is missing or unsuitable."""
    preload: tuple[str, ...]
    shares_output: bool
    """Both: see ``Ahead``."""
    reactor: Reactor
    log: EventLog
    say: Callable[[str], None]
    announce: Callable[[str], None]
    """Prints a line that is the same on all nodes; only one launcher of the job does."""
    check_stop: Callable[[], None]
    """Raises if the launcher was asked to stop."""
    known_children: Callable[[], Collection[int]]
    """PIDs of the launcher's children, servers included."""
    environment: Callable[[], dict[str, str]]
    """Environment common to all ranks, without torch's per-rank variables."""
    _expects_restart: bool = True
    _command: list[str] | None = None
    """Command of the ranks; None while ranks aren't forked."""
    _deaths: int = 0
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Watch the server that is already running."""
        if self.server is not None:
            self._watch(self.server)

    def prepare(self, argv: Sequence[str]) -> None:
        """Have the command of the ranks run ahead, if it isn't already."""
        reason = why_fresh(argv)
        if reason is not None:
            self._give_up(reason)
            return
        self._command = list(argv)
        self._have_server(without_ranks(self.environment()))

    def expect_restart(self, expected: bool) -> None:
        """Set if a cycle may follow the one whose ranks are spawned next; otherwise no server is needed then."""
        self._expects_restart = expected

    def spawn(self, specs: Sequence[RankSpec], on_spawned: WorkerCallback, on_exit: WorkerCallback) -> None:
        try:
            is_done = self._fork(specs, on_spawned, on_exit)
        except ServerError as error:
            self.log.write(ForkFailed(pids=tuple(sorted(self.pids())), reason=str(error)))
            is_done = False
        if not is_done:
            self.fresh.spawn(specs, on_spawned, on_exit)
        if not self._expects_restart:
            self.close()

    def pids(self) -> set[int]:
        """Return the PID of the server, if there is one."""
        return set() if self.server is None else {self.server.pid}

    def check_states(self) -> None:
        """Replace a server that was stopped (SIGSTOP)."""
        replace_if_stopped(self.reactor, lambda: min(self.pids(), default=None), self._kill)

    def _kill(self) -> None:
        if self.server is not None:
            self.server.kill()  # its end is noticed like any other

    def close(self) -> None:
        self._command = None
        self._drop()

    # -- the server ---------------------------------------------------------------------------------------

    def _server_for(self, specs: Sequence[RankSpec]) -> ServerProcess | None:
        """Return a server that has run ahead what these ranks run, with unchanged files; None without one.

        Raises:
            ServerError: the server doesn't answer.
        """
        if self._command is None:
            return None
        environment = shared_environment([spec.env for spec in specs])
        if environment is None or any(list(spec.argv) != self._command for spec in specs):
            self._give_up("the command lines or environments of the ranks differ")
            return None
        server = self._when_ready(environment)
        changed = None if server is None else server.changed_file()
        if changed is None:
            return server
        self.say(f"{changed} changed: running the script ahead again")
        self._drop()
        return self._when_ready(environment)

    def _when_ready(self, environment: dict[str, str]) -> ServerProcess | None:
        """Wait until the server is ready. Return None if it won't be."""
        self._have_server(environment)
        server = self.server
        while server is not None and server is self.server and not server.is_ready:
            self.check_stop()
            self.reactor.run_once(1.0)
        return server if server is self.server else None

    def _have_server(self, environment: dict[str, str]) -> None:
        """Start a server, unless the running one is suitable."""
        assert self._command is not None
        ahead = Ahead(self._command, environment, self.preload, self.shares_output)
        if self.server is not None and self.server.ahead != ahead:
            names = {name for name, _ in self.server.ahead.environment.items() ^ environment.items()}
            state = "for something else"
            self.log.write(ForkServer(state=state, pid=self.server.pid, names=tuple(sorted(names))))
            self._drop()
        if self.server is None:
            try:
                self.server = ServerProcess(ahead)
            except OSError as error:
                self.log.write(ForkServer(state="not started", reason=str(error)))
                return
            self._watch(self.server)

    def _watch(self, server: ServerProcess) -> None:
        self.log.write(ForkServer(state="started", pid=server.pid))
        server.watch(self.reactor, on_message=lambda: self._take(server), on_end=lambda: self._ended(server))
        left_s = server.started_s + FORK_POINT_S - time.monotonic()
        self.reactor.call_later(max(0.0, left_s), lambda: self._kill_if_late(server))

    def _take(self, server: ServerProcess) -> None:
        for message in server.read():
            if isinstance(message, ModuleLeftOut):
                self._say_once(f"--ft-preload: {message.name} could not be imported: {message.reason}")
            elif isinstance(message, ScriptReady):
                where, what, took_s = message.where, message.what, message.took_s
                self.log.write(
                    ForkServer(state="ready", pid=server.pid, where=where, what=what, took_s=round(took_s, 3))
                )
                self._say_once(lines.forked_at(where, what), lines.forked_at(where, what, took_s), self.announce)

    def _kill_if_late(self, server: ServerProcess) -> None:
        if not (server.is_ready or server.is_gone):
            server.reject(f"no fork point reached in {FORK_POINT_S:g} s")

    def _ended(self, server: ServerProcess) -> None:
        self._take(server)  # its last messages
        code = self._let_go(server)
        if server.unfit is not None:
            self._give_up(server.unfit)
            return
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS:
            self.say(f"the fork server died {self._deaths} times; ranks start as fresh interpreters")
            self._command = None
        elif self._command is not None:
            how = lines.exit_code(code)
            self.say(f"the fork server exited ({how}); ranks are not affected; starting a new one")
            self._have_server(server.ahead.environment)

    def _drop(self) -> None:
        """End a server that is unsuitable, or not needed any more."""
        if self.server is not None:
            self._let_go(self.server)

    def _let_go(self, server: ServerProcess) -> int:
        """End the server, if it hasn't ended. Return its exit code."""
        self.server = None
        code = server.end(self.known_children)
        self.log.write(ForkServer(state="ended", pid=server.pid, exit_code=code, reason=server.unfit))
        return code

    def _give_up(self, reason: str) -> None:
        self.close()
        self._say_once(f"ranks start as fresh interpreters: {reason}")
        self.log.write(FreshInterpreters(reason=reason))

    def _say_once(self, line: str, shown: str | None = None, say: Callable[[str], None] | None = None) -> None:
        if line not in self._said:
            self._said.add(line)
            (say or self.say)(shown or line)

    # -- ranks --------------------------------------------------------------------------------------------

    def _fork(self, specs: Sequence[RankSpec], on_spawned: WorkerCallback, on_exit: WorkerCallback) -> bool:
        """Fork the ranks. Return False without a server.

        Raises:
            ServerError: the server failed; no forked rank is used.
        """
        server = self._server_for(specs)
        if server is None:
            return False
        with contextlib.ExitStack() as stack:
            go_read, go_write = os.pipe()
            # whatever happens here, a rank that isn't told to go ends itself when this is closed
            stack.callback(close_fds, (go_read, go_write))
            requests = []
            for spec in specs:
                env = {name: value for name, value in spec.env.items() if is_set_for_ranks(name)}
                requests.append((env, [go_read, _output(spec.stdout, 1, stack), _output(spec.stderr, 2, stack)]))
            for spec, pid in zip(specs, server.fork_ranks(requests), strict=True):
                on_spawned(Worker(spec.local_rank, pid, os.pidfd_open(pid), on_exit))
            os.write(go_write, b"g" * len(specs))
        return True


def _output(path: str | None, own: int, stack: contextlib.ExitStack) -> int:
    return own if path is None else stack.enter_context(open(path, "w")).fileno()
