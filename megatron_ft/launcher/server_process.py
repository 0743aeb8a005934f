"""One generation of the fork server, as the launcher sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.ipc.open_files import give_back_to
from megatron_ft.ipc.processes import send_signal
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Message, Received
from megatron_ft.launcher import descendants

__all__ = ["SERVER_MODULE", "ServerError", "ServerProcess", "start_by_argv"]

SERVER_MODULE = "megatron_ft.rank.fork_server"
_MOST_ROOM = 100_000  # the kernel takes no argument beyond 128 KiB
_ANSWER_S = 3.0
"""A fork takes milliseconds; a server that needs longer is stopped, or stuck."""


class ServerError(FaultToleranceError):
    """A fork server doesn't do what it is asked."""


class ServerProcess:
    """A process that forks; a child of the launcher."""

    def __init__(
        self,
        pid: int,
        channel: Channel,
        *,
        environment: Mapping[str, str],
        on_reaped: Callable[[int], None] = lambda _code: None,
    ) -> None:
        """``environment``: in which it imported what it has imported. ``on_reaped`` is told its exit code."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.channel = channel
        self.channel_fd = channel.fileno()
        self.environment = dict(environment)
        self.on_channel_closed: Callable[[], None] = lambda: None
        """Called when the connection has closed itself: its number may soon be another's."""
        self.is_ready = False
        self.is_gone = False
        self.importing: str | None = None
        """What it imports now, and since when (monotonic seconds)."""
        self.since_s = time.monotonic()
        self.unfit: tuple[str | None, str] | None = None
        """The module that made it unfit, if one did, and how."""
        self.failed: dict[str, str] = {}
        """Modules that can't be imported, and why."""
        self.modules: frozenset[str] = frozenset()
        """Top-level names of what it has imported."""
        self.started_s = time.monotonic()
        self._on_reaped = on_reaped

    def read(self) -> None:
        """Take what it has sent."""
        if self.channel.fileno() < 0:
            return
        try:
            received = self.channel.receive()
        except (ChannelClosedError, ProtocolError):
            self.on_channel_closed()
            self.kill()  # it is ending anyway: its pidfd says when
            return
        for message, _ in received:
            self._take(message)

    def fork_ranks(self, requests: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> Iterator[int | ServerError]:
        """For each request (what to run, descriptors to hand over) the process id of a new rank, or why there is none.

        The ranks are children of the launcher by then. A server that is gone or doesn't answer is killed, and the
        rest of the requests fail.
        """
        yield from self._ask([({"type": "spawn", **request}, fds) for request, fds in requests])

    def grow(
        self, modules: Sequence[tuple[str, str | None]], *, expected: Mapping[str, str], script_dir: str | None
    ) -> ServerProcess:
        """A fork of it that goes on to import ``modules``, each from its file if one is given.

        ``expected``: where the ranks import modules from; what comes from elsewhere makes that server unfit.

        Raises:
            ServerError: it can't fork, is gone, or doesn't answer; then it is killed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, open(os.memfd_create("ft_imports"), "w+") as file:
                # there may be more of it than fits into a message
                json.dump({"modules": modules, "expected": expected, "script_dir": script_dir}, file)
                file.seek(0)
                (pid,) = self._ask([({"type": "grow"}, [theirs.fileno(), file.fileno()])])
                if isinstance(pid, ServerError):
                    raise pid
            child = ServerProcess(pid, Channel(ours), environment=self.environment)
        except (OSError, ServerError):
            ours.close()
            raise
        with contextlib.suppress(ChannelClosedError):  # then it is gone at once, as its pidfd says
            child.channel.send({"type": "go"})
        return child

    def kill(self) -> None:
        """End it, stopped or not; it has nothing to tidy up."""
        if not self.is_gone:
            send_signal(self.pidfd, signal.SIGKILL)

    def end(self) -> None:
        """End it, and wait for that."""
        self.kill()
        poller = select.poll()  # not select(): the number may be beyond 1023
        poller.register(self.pidfd, select.POLLIN)
        poller.poll()
        self.reap()

    def reap(self) -> int:
        """Let it go, once it has ended; how it ended, as subprocess has it."""
        assert not self.is_gone
        code = descendants.exit_code_unreaped(self.pid)
        assert code is not None, "it lives"
        descendants.reap(self.pid)
        self._on_reaped(code)
        self.is_gone, self.is_ready = True, False
        self.channel.close()
        os.close(self.pidfd)
        return code

    def _ask(self, requests: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> Iterator[int | ServerError]:
        unanswered = len(requests)
        try:
            if self.is_gone or descendants.is_stopped(self.pid):
                raise TimeoutError("it is stopped")
            for request, fds in requests:
                self.channel.send(request, fds)
            while unanswered:
                for message, _ in self._wait_for_answers():
                    unanswered -= 1
                    yield int(message["pid"]) if message["type"] == "forked" else ServerError(str(message["reason"]))
        except (ChannelClosedError, ProtocolError, TimeoutError) as error:
            if self.channel.fileno() < 0:
                self.on_channel_closed()
            self.kill()
            for _ in range(unanswered):
                yield ServerError(str(error))

    def _wait_for_answers(self) -> list[Received]:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        if not poller.poll(_ANSWER_S * 1e3):
            raise TimeoutError(f"no answer for {_ANSWER_S:g} s")
        return self.channel.receive()

    def _take(self, message: Message) -> None:
        kind = message["type"]
        if kind == "importing":
            self.importing, self.since_s = str(message["name"]), time.monotonic()
        elif kind == "unfit":
            self.unfit = (message["spoiled_by"], str(message["reason"]))
        elif kind == "ready":
            self.is_ready, self.importing = True, None
            self.failed = dict(message["failed"])
            self.modules = frozenset(message["modules"])


def start_by_argv(imports: Sequence[str]) -> ServerProcess:
    """A server in a fresh interpreter.

    Raises:
        OSError: it can't be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        argv = [sys.executable, "-u", "-m", SERVER_MODULE, *server_options(theirs.fileno(), os.getpid(), imports)]
        argv += ["--room", " ".join(sys.orig_argv)[:_MOST_ROOM]]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        except OSError:
            ours.close()
            raise
    give_back_to(process.pid)

    def on_reaped(code: int) -> None:
        process.returncode = code  # else Popen would wait for a number that may be another's by then

    return ServerProcess(process.pid, Channel(ours), environment=os.environ, on_reaped=on_reaped)


def server_options(fd: int, launcher_pid: int, imports: Sequence[str]) -> list[str]:
    """Its command line, behind the name of its module."""
    return ["--fd", str(fd), "--launcher", str(launcher_pid), *(f"--import={name}" for name in imports)]
