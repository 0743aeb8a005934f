"""Ranks forked from a process that has imported what they import, or else fresh interpreters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.facts.launcher import ForkFailed, ForkServer, FreshInterpreters
from megatron_ft.core.messages.fork_server_messages import ImportActs, ImportsReady, ModuleLeftOut
from megatron_ft.core.rank_variables import is_set_for_ranks, shared_environment, without_ranks
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.processes.process_tree import replace_if_stopped
from megatron_ft.launcher.processes.worker import FreshInterpreterSpawner, RankSpec, Worker, WorkerCallback
from megatron_ft.launcher.spawn.fork_server import ServerError, ServerProcess, why_fresh
from megatron_ft.link.reactor import Reactor
from megatron_ft.run_ahead.orders import Orders

_MOST_DEATHS = 5
"""Number of dead servers after which no other is started."""
_MOST_ACTS = 5
"""Number of imports that act after which the shared part ends at the first one."""


@dataclass(kw_only=True)
class ForkingSpawner:
    """Spawner with one fork server at a time, and another spawner as fallback."""

    fresh: FreshInterpreterSpawner
    server: ServerProcess | None
    """Initially one that is already running; another is started if it is missing or unsuitable."""
    preload: tuple[str, ...]
    """Modules to import first, at the user's request."""
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
    _left_out: list[str] = field(default_factory=list)
    """Imports that act."""
    _waiting: int = 0
    """Number of forked ranks that wait for the order to go on."""
    _go_fd: int = -1
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Watch the server that is already running."""
        if self.server is not None:
            self._watch(self.server)

    def prepare(self, argv: Sequence[str]) -> None:
        """Have imported what ranks with this command import, if it isn't already."""
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

    def release(self) -> None:
        """Let the forked ranks go on, once the start of their cycle was reported."""
        if self._go_fd >= 0:
            with contextlib.suppress(BrokenPipeError):  # all have ended
                os.write(self._go_fd, b"g" * self._waiting)
            os.close(self._go_fd)
            self._go_fd = -1

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
        """Return a server with the imports of these ranks, of unchanged files; None without one.

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
        self.say(f"{changed} changed: importing anew")
        self._left_out.clear()
        self._drop()
        return self._when_ready(environment)

    def _when_ready(self, environment: dict[str, str]) -> ServerProcess | None:
        """Wait until the server is ready. Return None if an import acts, or the server ends: another one begins."""
        self._have_server(environment)
        server = self.server
        while server is not None and server is self.server and not server.is_ready:
            self.check_stop()
            self.reactor.run_once(1.0)
        return server if server is self.server else None

    def _have_server(self, environment: dict[str, str]) -> None:
        """Start a server, unless the running one is suitable."""
        assert self._command is not None
        ends_first = len(self._left_out) >= _MOST_ACTS
        orders = Orders(self._command, environment, self.preload, tuple(self._left_out), ends_first)
        if self.server is not None and self.server.orders != orders:
            names = {name for name, _ in self.server.orders.environment.items() ^ environment.items()}
            state = "for something else"
            self.log.write(ForkServer(state=state, pid=self.server.pid, names=tuple(sorted(names))))
            self._drop()
        if self.server is None:
            try:
                self.server = ServerProcess(orders)
            except OSError as error:
                self.log.write(ForkServer(state="not started", reason=str(error)))
                return
            self._watch(self.server)

    def _watch(self, server: ServerProcess) -> None:
        self.log.write(ForkServer(state="started", pid=server.pid))
        server.watch(self.reactor, on_message=lambda: self._take(server), on_end=lambda: self._ended(server))

    def _take(self, server: ServerProcess) -> None:
        for message in server.read():
            if isinstance(message, ModuleLeftOut):
                self._say_once(f"--ft-preload: {message.name} could not be imported: {message.reason}")
            elif isinstance(message, ImportsReady):
                where, took_s = message.where, round(message.took_s, 3)
                self.log.write(ForkServer(state="ready", pid=server.pid, where=where, took_s=took_s))
                self._say_once(
                    launcher_lines.imports_shared(where), launcher_lines.imports_shared(where, took_s), self.announce
                )
            elif isinstance(message, ImportActs):
                self._left_out.append(message.statement)
                what = f"{message.module} {message.what}"
                state = ForkServer(
                    state="acts", pid=server.pid, where=message.where, what=what, reason=message.statement
                )
                self.log.write(state)
                self._say_once(launcher_lines.import_acts(message.statement, message.where, what), say=self.announce)

    def _ended(self, server: ServerProcess) -> None:
        self._take(server)  # its last messages
        code = self._let_go(server)
        if server.unfit is not None:
            self._give_up(server.unfit)
            return
        if server.acted is None:
            self._deaths += 1
            if self._deaths >= _MOST_DEATHS:
                self.say(f"the fork server died {self._deaths} times: every rank starts its own Python")
                self._command = None
            elif self._command is not None:
                how = launcher_lines.exit_code(code)
                self.say(f"the fork server exited ({how}); ranks are not affected; starting a new one")
        if self._command is not None:
            self._have_server(server.orders.environment)

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
        self._say_once(f"fork server off ({reason}): every rank starts its own Python")
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
        go_read, go_write = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, go_read)
            # whatever happens here, a rank that isn't told to go ends itself when this is closed
            keep = stack.enter_context(contextlib.ExitStack())
            keep.callback(os.close, go_write)
            requests = []
            for spec in specs:
                env = {name: value for name, value in spec.env.items() if is_set_for_ranks(name)}
                requests.append((env, [go_read, _output(spec.stdout, 1, stack), _output(spec.stderr, 2, stack)]))
            for spec, pid in zip(specs, server.fork_ranks(requests), strict=True):
                on_spawned(Worker(spec.local_rank, pid, os.pidfd_open(pid), on_exit))
            keep.pop_all()
        self._go_fd, self._waiting = go_write, len(specs)
        return True


def _output(path: str | None, own: int, stack: contextlib.ExitStack) -> int:
    return own if path is None else stack.enter_context(open(path, "w")).fileno()
