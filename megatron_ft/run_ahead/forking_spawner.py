"""The launcher's side: the fork server as its child process, and when ranks are forked from which server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.errors import ProtocolError
from megatron_ft.link import process_tree
from megatron_ft.link.base.rank_variables import is_set_for_ranks, shared_environment, without_ranks
from megatron_ft.link.base.signal_rules import signal_name
from megatron_ft.link.facts.launcher import ForkServer
from megatron_ft.link.linux.process_setup import restore_file_limit
from megatron_ft.link.linux.processes import send_signal, wait_gone
from megatron_ft.link.messages import fork_server_messages as messages
from megatron_ft.link.messages.fork_server_messages import FilesChanged, Forked, FromServer, Orders, RankSpec
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import Channel, ChannelClosedError
from megatron_ft.records.event_log import EventLog
from megatron_ft.run_ahead.startup import with_startup

_ANSWER_S = 10.0
"""Longest wait for an answer. A fork takes milliseconds, but the server may be importing what ranks have loaded."""
_LONGEST_END_S = 5.0
_MOST_DEATHS = 5
"""Number of dead servers after which no other is started."""


class ServerProcess:
    """The fork server, a child of the launcher. Raises OSError if it can't be started."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.last: FromServer | None = None
        """Its last report."""
        self.is_ready = self.is_gone = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(ours, takes_fds=False)
        self.channel_fd = ours.fileno()
        given = {name: orders.environment[name] for name in orders.environment.keys() & {"PYTHONPATH"}}
        asked = {"fd": theirs.fileno(), "launcher": os.getpid(), **orders._asdict(), "environment": given}
        own = {messages.RUN_AHEAD_VARIABLE: json.dumps(asked), "PYTHONPATH": with_startup(given.get("PYTHONPATH"))}
        # what imports print is written by each rank
        out, err = (open(os.memfd_create(name), "wb") for name in ("ft_stdout", "ft_stderr"))  # noqa: SIM115
        with theirs, out, err:
            self._process = subprocess.Popen(
                orders.command,
                env={**orders.environment, **own},
                stdout=out,
                stderr=err,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        restore_file_limit(self.pid)
        self.pidfd = os.pidfd_open(self.pid)

    def read(self) -> list[FromServer]:
        """Return new reports: the imports are done, or one acts; it has failed.

        Raises:
            ChannelClosedError, ProtocolError: it ends, or says something else.
        """
        reports = [messages.FROM_SERVER.parse(message) for message, _ in self.channel.receive()]
        self.last = reports[-1] if reports else self.last
        self.is_ready = isinstance(self.last, messages.ImportsReady)
        return reports

    def fork_ranks(self, requests: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> FromServer:
        """Fork a rank for each request (variables, and descriptors of go, standard output and error).

        The ranks of `Forked` are children of the launcher. Each waits for a byte at go, or for its end, at which it
        ends. Otherwise return `FilesChanged`; or `Failed`, whatever the reason is, and the server is killed.
        """
        try:
            if process_tree.is_stopped(self.pid):
                raise TimeoutError("it is stopped")
            for done, (env, fds) in enumerate(requests, 1):
                self.channel.send(messages.Spawn(env, len(requests) - done), fds)
            answer = messages.FROM_SERVER.parse(self.channel.wait_message(_ANSWER_S).message)
            if isinstance(answer, FilesChanged):
                return answer
            if not isinstance(answer, Forked) or len(set(answer.pids)) != len(requests):
                raise ProtocolError(answer.reason if isinstance(answer, messages.Failed) else f"it answers {answer}")
            for pid in answer.pids:
                try:
                    process_tree.exit_code_unreaped(pid)
                except ChildProcessError:
                    raise ProtocolError(f"process {pid}, its rank, is no child of the launcher") from None
            return answer
        except (ChannelClosedError, ProtocolError, TimeoutError) as error:
            send_signal(self.pidfd, signal.SIGKILL)
            self.last = messages.Failed(str(error))
            return self.last

    def end(self, known_children: Callable[[], Collection[int]]) -> int:
        """Kill the server and its leftovers, reap it, and return its exit code as in ``subprocess``.

        Leftovers are children of imported modules, and ranks just forked and not reported: children of the launcher
        that aren't in ``known_children``. A server that is stuck in the kernel is left behind, and counts as killed.
        """
        send_signal(self.pidfd, signal.SIGKILL)  # stopped or not: it needs no cleanup
        wait_gone(self.pidfd, _LONGEST_END_S)
        process_tree.end_strays(self.pid, messages.FORK_SERVER_NAME, known_children)
        if self._process.poll() is None:  # otherwise Popen would wait for it
            self._process.returncode = -signal.SIGKILL
        self.is_gone = True
        self.channel.close()
        os.close(self.pidfd)
        return self._process.returncode


@dataclass(kw_only=True)
class ForkingSpawner:
    """Forks ranks, with one fork server at a time. Its caller starts ranks otherwise when it can't."""

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
    expects_restart: bool = True
    """True if a cycle may follow the one whose ranks are forked next; otherwise no server is needed then."""
    _command: list[str] | None = None
    """Command of the ranks; None while ranks aren't forked."""
    _deaths: int = 0
    _left_out: list[str] = field(default_factory=list)
    """Imports that act."""
    _go: tuple[int, int] | None = None
    """Descriptor of the order to go on, and number of the forked ranks that wait for it."""
    _said: set[str] = field(default_factory=set)

    def prepare(self, argv: Sequence[str], why_fresh: str | None) -> None:
        """Have imported what ranks with this command import, unless there is a reason for fresh interpreters."""
        if self.server is not None:
            self._watch(self.server)
        if why_fresh is not None:
            self._give_up(why_fresh)
            return
        self._command = list(argv)
        self._have_server(without_ranks(self.environment()))

    def fork(self, specs: Sequence[RankSpec], adopt: Callable[[RankSpec, int], None]) -> bool:
        """Fork the ranks and call ``adopt`` with each and its PID. They wait for ``release``.

        Return False if none was made, and they have to be fresh interpreters.
        """
        try:
            server = None if self._command is None else self._ready_server(specs)
            return server is not None and self._fork(server, specs, adopt)
        finally:
            if not self.expects_restart:
                self.close()

    def release(self) -> None:
        """Let the forked ranks go on, once the start of their cycle was reported."""
        if self._go is not None:
            fd, count = self._go
            self._go = None
            with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as go:  # all have ended
                go.write(b"g" * count)

    def pids(self) -> set[int]:
        """Return the PID of the server, if there is one."""
        return set() if self.server is None else {self.server.pid}

    def close(self) -> None:
        self._command = None
        if self.server is not None:
            self._end(self.server)

    def _fork(self, server: ServerProcess, specs: Sequence[RankSpec], adopt: Callable[[RankSpec, int], None]) -> bool:
        go_read, go_write = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, go_read)
            # whatever happens here, a rank that isn't told to go ends itself when this is closed
            keep = stack.enter_context(contextlib.ExitStack())
            keep.callback(os.close, go_write)
            requests = []
            for spec in specs:
                streams = [
                    own if path is None else stack.enter_context(open(path, "w")).fileno()
                    for path, own in ((spec.stdout, 1), (spec.stderr, 2))
                ]
                variables = {name: value for name, value in spec.env.items() if is_set_for_ranks(name)}
                requests.append((variables, [go_read, *streams]))
            answer = server.fork_ranks(requests)
            if isinstance(answer, messages.Failed):
                self.log.write(ForkServer(state="fork failed", pid=server.pid, reason=answer.reason))
                self._replace(server)
            if isinstance(answer, FilesChanged):
                self.say(f"{answer.path} changed: importing anew")
                self._left_out.clear()
                self._end(server)
                self._have_server(server.orders.environment)
            if not isinstance(answer, Forked):
                return False
            for spec, pid in zip(specs, answer.pids, strict=True):
                adopt(spec, pid)
            keep.pop_all()
        self._go = go_write, len(specs)
        return True

    # -- the server ---------------------------------------------------------------------------------------

    def _ready_server(self, specs: Sequence[RankSpec]) -> ServerProcess | None:
        """Wait until a server is ready. Return None if an import acts, or the server ends: another one begins."""
        environment = shared_environment([spec.env for spec in specs])
        if environment is None or any(list(spec.argv) != self._command for spec in specs):
            self._give_up("the command lines or environments of the ranks differ")
            return None
        self._have_server(environment)
        server = self.server
        while server is not None and server is self.server and not server.is_ready:
            self.check_stop()
            self.reactor.run_once(1.0)
        return server if server is self.server else None

    def _have_server(self, environment: dict[str, str]) -> None:
        """Start a server, unless the running one is suitable."""
        assert self._command is not None
        orders = Orders(self._command, environment, self.preload, tuple(self._left_out))
        if self.server is not None and self.server.orders != orders:
            names = sorted({name for name, _ in self.server.orders.environment.items() ^ environment.items()})
            self._end(self.server, f"its orders have changed: {', '.join(names)}")
        if self.server is None:
            try:
                self.server = ServerProcess(orders)
            except OSError as error:
                self.log.write(ForkServer(state="not started", reason=str(error)))
                return
            self._watch(self.server)

    def _watch(self, server: ServerProcess) -> None:
        self.log.write(ForkServer(state="started", pid=server.pid))
        self.reactor.watch(server.channel_fd, lambda: self._take(server))

    def _take(self, server: ServerProcess) -> None:
        """Tell what the server reports. A server that can't be heard any more is replaced."""
        try:
            reports = server.read()
        except (ChannelClosedError, ProtocolError):
            self._replace(server)
            return
        for report in reports:
            match report:
                case messages.ImportsReady(where=where, took_s=took_s):
                    self.log.write(ForkServer(state="ready", pid=server.pid, where=where, took_s=round(took_s, 3)))
                    if where:
                        self._say_once(f"ranks share the imports up to {where}", self.announce, f" ({took_s:.1f} s)")
                case messages.ImportActs(statement=reason, where=where):
                    self._left_out.append(reason)
                    what = f"{report.module} {report.what}"
                    self.log.write(ForkServer(state="acts", pid=server.pid, where=where, what=what, reason=reason))
                    place = f" ({where})" if where else ""
                    self._say_once(f"each rank does {reason!r}{place} itself: {what}", self.announce)

    def _replace(self, server: ServerProcess) -> None:
        """Start another server, unless too many have died."""
        code = self._end(server)
        if self._command is None:
            return
        if not isinstance(server.last, messages.ImportActs):
            self._deaths += 1
            how = f"code {code}" if code >= 0 else signal_name(-code)
            how = f"{how}: {server.last.reason}" if isinstance(server.last, messages.Failed) else how
            if self._deaths >= _MOST_DEATHS:
                self._command = None
                self.say(f"the fork server died {self._deaths} times ({how}): every rank starts its own Python")
                return
            self.say(f"the fork server exited ({how}); ranks are not affected; starting a new one")
        self._have_server(server.orders.environment)

    def _end(self, server: ServerProcess, reason: str | None = None) -> int:
        """End the server, if it hasn't ended. Return its exit code."""
        self.server = None
        self.reactor.unwatch(server.channel_fd)
        code = server.end(self.known_children)
        self.log.write(ForkServer(state="ended", pid=server.pid, exit_code=code, reason=reason))
        return code

    def _give_up(self, reason: str) -> None:
        self.close()
        self._say_once(f"fork server off ({reason}): every rank starts its own Python", self.say)
        self.log.write(ForkServer(state="given up", reason=reason))

    def _say_once(self, line: str, say: Callable[[str], None], rest: str = "") -> None:
        if line not in self._said:
            self._said.add(line)
            say(f"{line}{rest}")
